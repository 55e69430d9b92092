"""Panels of the pictures of guesses: a plane with a cloud of estimates, and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from method_pictures.samples import DRAWS, OPEN, UNITS, Plane, bars_of
from method_pictures.svg import GREY, Picture, Point
from torch import Tensor

from gradguess.guesses import Guess


def plane_panel(
    picture: Picture,
    plane: Plane,
    colour: str,
    left: float,
    title: str,
    origin: Point = (0.24, 0.66),
    unit: float = 64,
    dot: float = 5,
) -> None:
    """The gradient, the directions, the cloud and its mean, in a panel of 340 × 235."""
    x0, y0 = left + 340 * origin[0], 36 + 235 * origin[1]
    middle = plane.start

    def at(v: Sequence[float] | Tensor) -> tuple[float, float]:
        return x0 + unit * float(v[0]), y0 - unit * float(v[1])

    picture.text((left, 18), title, bold=True)
    name = f"clip{int(left)}"
    picture.add(f"<clipPath id='{name}'><rect x='{left}' y='30' width='340' height='245'/></clipPath>")
    picture.add(f"<g clip-path='url(#{name})'>")
    picture.line([(left, y0), (left + 340, y0)], width=0.7, opacity=0.5)
    picture.line([(x0, 30), (x0, 275)], width=0.7, opacity=0.5)
    values, axes = torch.linalg.eigh(plane.cov)
    sizes = values.clamp_min(0).sqrt()
    if float(sizes[0]) < 0.03:  # a line
        axis = axes[:, 1] if axes[1, 1] > 0 else -axes[:, 1]
        picture.line([at(middle - 10 * axis), at(middle + 10 * axis)], colour, 1, opacity=0.5)
        picture.line([at(middle - sizes[1] * axis), at(middle + sizes[1] * axis)], colour, 12, opacity=0.3)
    else:
        round_ = float(sizes[1] - sizes[0]) < 1e-6
        angle = 0 if round_ else -math.degrees(math.atan(float(axes[1, 1] / axes[0, 1])))
        cx, cy = at(middle)
        rx, ry = (f"{unit * float(size):.1f}" for size in (sizes[1], sizes[0]))
        picture.add(
            f"<ellipse rx='{rx}' ry='{ry}' transform='translate({cx:.1f} {cy:.1f}) rotate({angle:.1f})' "
            f"fill='{colour}' fill-opacity='0.18' stroke='{colour}' stroke-width='1.5' stroke-dasharray='5 4'/>"
        )
    picture.dots([at(v) for v in plane.cloud], colour, dot)
    picture.add("</g>")
    picture.arrow([at((0, 0)), at(plane.g)], GREY, 3.5)
    picture.arrow([at((0, 0)), at(plane.mean)], colour, 2)
    picture.add(_diamond(*at(plane.cloud.mean(0)), colour))
    if plane.start.any():
        x, y = at(plane.start)
        picture.add(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='7' fill='none' stroke='{colour}' stroke-width='3'/>")
        picture.text((x - 6, y - 12), "h", colour, "end", bold=True)
    picture.text((left, 294), f"bias {plane.bias:.2f}, variance {plane.variance:.2f}", colour, bold=True)


def bars_panel(
    picture: Picture, guess: Guess, colour: str, left: float, title: str, high: float = 2.2, step: float = 36
) -> None:
    """How strongly each singular direction is guessed, and where the gradient lies."""
    bars = bars_of(guess)
    bottom, unit = 232, 190 / high
    picture.text((left, 18), title, bold=True)
    picture.line([(left + 24, bottom), (left + 24 + step * UNITS, bottom)], width=1)
    for level in (0, 1, 2):
        if level <= high:
            picture.text((left + 16, bottom - unit * level + 5), str(level), anchor="end", size=13)
    picture.line([(left + 24, bottom - unit), (left + 24 + step * UNITS, bottom - unit)], width=1, dash="3 4")
    centres = [left + 24 + step * (i + 0.5) for i in range(UNITS)]
    for x, value in zip(centres, bars.weights, strict=True):
        tall = unit * value
        if tall > 0.5:
            place = f"x='{x - 0.3 * step:.1f}' y='{bottom - tall:.1f}' width='{0.6 * step:.1f}' height='{tall:.1f}'"
            picture.add(f"<rect {place} fill='{colour}' fill-opacity='0.55'/>")
    picture.dots([(x, bottom - unit * share) for x, share in zip(centres, bars.shares, strict=True)], GREY, 9, 1)
    for i, x in enumerate(centres):
        if i < OPEN or i == (OPEN + UNITS) // 2:
            picture.text((x, bottom + 17), str(i + 1) if i < OPEN else "off", anchor="middle", size=13)
    picture.text((left + 24, bottom + 36), "directions of W̃, strongest first", size=13)
    if step > 30:  # else there is no room
        picture.dots([(left + 250, bottom + 31)], GREY, 9, 1)
        picture.text((left + 260, bottom + 36), "where g lies", size=13)
    picture.text((left, 294), f"bias {bars.bias:.2f}, variance {bars.variance:.2f}", colour, bold=True)


def legend(picture: Picture, colour: str) -> None:
    """What the marks mean, in one row."""
    y = 318
    picture.arrow([(0, y - 5), (24, y - 5)], GREY, 3.5)
    picture.text((32, y), "gradient g, length 1", size=13)
    picture.add(
        f"<ellipse cx='192' cy='{y - 5}' rx='12' ry='7' fill='{colour}' fill-opacity='0.18' stroke='{colour}' "
        "stroke-dasharray='4 3'/>"
    )
    picture.text((210, y), "directions (1 sd)", size=13)
    picture.dots([(338, y - 5), (344, y - 9), (348, y - 3)], colour, 5, 0.8)
    picture.text((357, y), f"{DRAWS} estimates", size=13)
    picture.add(_diamond(465, y - 5, colour))
    picture.text((477, y), "their mean", size=13)
    picture.arrow([(566, y - 5), (588, y - 5)], colour, 2)
    picture.text((597, y), "expected mean", size=13)


def _diamond(x: float, y: float, colour: str) -> str:
    return f"<path d='M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z' fill='{colour}' stroke='{GREY}' stroke-width='1.5'/>"
