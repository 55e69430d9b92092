"""Draw the picture of every method for `docs/methods`, into `docs/figures/methods`.

Run after a change of a guess, a colour or a drawing: `python scripts/make_method_pictures.py`. Clouds, covariances and
influences come from the library itself, with fixed seeds, in float64. A test makes the pictures again and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from method_influence import of_rules
from method_schematics import SCHEMATICS
from method_svg import GREY, Picture, colour_of
from torch import Tensor, nn

import gradguess as gg
from gradguess.guesses import Frame, Guess, SiteView
from gradguess.jacobian import GatedLinear
from gradguess.noise import Noise

FOLDER = Path(__file__).parents[1] / "docs" / "figures" / "methods"
DRAWS = 200  # estimates in a cloud
ANGLE = math.radians(30)  # of the gradient to the horizontal
TURN = math.radians(12)  # of the strongest direction of W̃ to the horizontal
SPREAD = (1.2, 0.5)  # singular values of W̃ at the site with two units
SAMPLES, UNITS, OPEN, K = 64, 8, 5, 3  # of the site whose directions are shown as bars
torch_double = partial(torch.tensor, dtype=torch.float64)


# --- what the library says ------------------------------------------------------------------------------------


def frame_of(guess: Guess, weight: Tensor, gate: Tensor) -> Frame:
    """The guess's frame below a linear layer with these gates, after a search on the same samples."""
    W = GatedLinear(weight, gate)

    def view(kept: dict[str, Tensor]) -> SiteView:
        return SiteView("site", gate, gate, True, kept, Noise(torch.Generator().manual_seed(0)), lambda: W)

    return guess.frame(view(guess.search(view({}))))


def covariance(frame: Frame, d: int) -> Tensor:
    """`A Aᵀ` of every sample, (batch, d, d)."""
    eye = torch.eye(d, dtype=torch.float64)
    return frame.covariance_times(eye[:, None].expand(d, frame.batch, d)).movedim(0, 2)


@dataclass
class Plane:
    """A cloud of single estimates of a gradient of length one in a plane, and what is known of their law."""

    g: Tensor  # (2,)
    cloud: Tensor  # (DRAWS, 2)
    cov: Tensor  # of the directions, (2, 2)
    mean: Tensor  # of an estimate, (2,)
    variance: float  # the trace of its covariance
    start: Tensor  # what is known before the guess, (2,)

    @property
    def bias(self) -> float:
        return float((self.mean - self.g).norm())


def law(g: Tensor, cloud: Tensor, cov: Tensor, others: float = 0.0, start: Tensor | None = None) -> Plane:
    """Mean and variance for Gaussian directions, as `docs/guesses.md` and `docs/feedback.md` have them.

    `others` is the mean square of what other sites and parameters add to the measured derivative.
    """
    start = torch.zeros_like(g) if start is None else start
    δ = g - start
    variance = cov.trace() * (δ @ cov @ δ + others) + (cov @ δ).square().sum()
    return Plane(g, cloud, cov, start + cov @ δ, float(variance), start)


def rotated(angle: float) -> Tensor:
    return torch_double([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def linear_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum(1)


def two_units() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A network with two open units: model, one input, its target, the gradient."""
    V, g = rotated(TURN), rotated(ANGLE)[:, 0]
    W = rotated(0.7) @ torch.diag(torch_double(SPREAD)) @ V.T
    target = torch.linalg.solve(W.T, g)
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    model[0].weight.data, model[2].weight.data = torch.ones(2, 1, dtype=torch.float64), W
    return model, torch.ones(1, 1, dtype=torch.float64), target[None], g


def guessed(guess: Guess) -> Plane:
    """One estimate for each of `DRAWS` equal samples; no noise of the site above."""
    model, x, t, g = two_units()
    source = torch.Generator().manual_seed(1)
    est = gg.estimate(
        model, guess, linear_loss, x.expand(DRAWS, -1), t.expand(DRAWS, -1), isolate=True, generator=source
    )
    frame = frame_of(guess, model[2].weight.detach(), torch.ones(1, 2, dtype=torch.float64))
    return law(g, est.site_grads["0"], covariance(frame, 2)[0])


def perturbed(method: gg.WeightPerturbation | gg.baselines.MeZO, parameters: int) -> Plane:
    """Two parameters of a linear model with `parameters` of them, all with gradients of about the same size."""
    g = rotated(ANGLE)[:, 0]
    x = torch.cat([g, torch.full((parameters - 2,), math.sqrt(0.5), dtype=torch.float64)])[None]
    model = nn.Linear(parameters, 1, bias=False).double()
    model.weight.data.zero_()
    source, cloud = torch.Generator().manual_seed(1), []
    for _ in range(DRAWS):
        est = gg.estimate(model, method, linear_loss, x, torch.ones(1, 1, dtype=torch.float64), generator=source)
        cloud.append(est.grads["weight"][0, :2])
    return law(g, torch.stack(cloud), torch.eye(2, dtype=torch.float64), others=(parameters - 2) / 2)


def along_a_student(angle: float) -> Plane:
    """A local guess whose student is a linear map; its gradient points `angle` beside the true one."""
    model, x, t, g = two_units()
    h = rotated(ANGLE - angle)[:, 0]

    def make(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
        student = nn.Linear(2, 2, bias=False)
        student.weight.data = torch.outer(t[0], h).float()
        return student

    x, t = x.expand(DRAWS, -1), t.expand(DRAWS, -1)
    source = torch.Generator().manual_seed(1)
    cloud = gg.estimate(model, gg.LocalGuess(make), linear_loss, x, t, generator=source).site_grads["0"]
    cov = torch.outer(h, h)
    # The direction has one length: only the other site, whose gradient is t, adds noise.
    return Plane(g, cloud, cov, cov @ g, float(t[0].square().sum()), torch.zeros_like(g))


def corrected(lessons: int) -> Plane:
    """Feedback, corrected, after some lessons from white noise; each estimate is a step of its own that teaches nothing."""
    model, x, t, g = two_units()
    guess = gg.ActivationPerturbation()

    def forward(rate: float, seed: int) -> gg.ForwardGradient:
        return gg.ForwardGradient(model, gg.Feedback(guess, form="corrected", rate=rate), seed=seed)

    teacher, taught = forward(0.3, 0), forward(0.0, 1)
    for _ in range(lessons):
        teacher(linear_loss, x.expand(8, -1), t.expand(8, -1))
    if lessons:
        taught.load_state_dict(teacher.state_dict())
    cloud = []
    for _ in range(DRAWS):
        model.zero_grad()
        taught(linear_loss, x, t)
        cloud.append(model[0].weight.grad[:, 0].clone())
    h = taught.learned["0"]["B"] @ t[0] if lessons else torch.zeros_like(g)
    frame = frame_of(guess, model[2].weight.detach(), torch.ones(1, 2, dtype=torch.float64))
    return law(g, torch.stack(cloud), covariance(frame, 2)[0], start=h)


@dataclass
class Bars:
    """Means over the samples of a batch at a site with `UNITS` units, `OPEN` of them open."""

    weights: list[float]  # `vᵀ Cov(y) v` by singular direction v of W̃, strongest first
    shares: list[float]  # of the squared gradient, on each v
    bias: float  # for gradients of length one
    variance: float


def bars_of(guess: Guess) -> Bars:
    """What a guess does at a site whose samples have gates of their own; gradients are `W̃ᵀε`, made as long as one."""
    source = torch.Generator().manual_seed(2)
    normal = partial(torch.randn, generator=source, dtype=torch.float64)
    U, V = (torch.linalg.qr(normal(UNITS, UNITS))[0] for _ in range(2))
    W = U @ torch.diag(torch_double([1.6, 1.45, 1.3, 0.6, 0.45, 0.35, 0.25, 0.15])) @ V.T
    gate = (normal(SAMPLES, UNITS).argsort(1).argsort(1) < OPEN).double()
    Vh = torch.linalg.svd(W * gate[:, None, :])[2]
    g = (normal(SAMPLES, UNITS) @ W) * gate
    g = g / g.norm(dim=1, keepdim=True)
    cov = covariance(frame_of(guess, W, gate), UNITS)
    mean = torch.einsum("bde,be->bd", cov, g)
    variance = cov.diagonal(dim1=1, dim2=2).sum(1) * (g * mean).sum(1) + mean.square().sum(1)
    weights = torch.einsum("bjd,bde,bje->bj", Vh, cov, Vh)
    weights[:, OPEN:] = weights[:, OPEN:].mean(1, keepdim=True)  # directions without a singular value have no order
    shares = torch.einsum("bjd,bd->bj", Vh, g).square()
    bias = (mean - g).norm(dim=1)
    return Bars(weights.mean(0).tolist(), shares.mean(0).tolist(), float(bias.mean()), float(variance.mean()))


# --- panels ---------------------------------------------------------------------------------------------------


def plane_panel(
    picture: Picture,
    plane: Plane,
    colour: str,
    left: float,
    title: str,
    origin=(0.24, 0.66),
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
        axis = axes[:, 1]
        picture.line([at(middle - 10 * axis), at(middle + 10 * axis)], colour, 1, opacity=0.5)
        picture.line([at(middle - sizes[1] * axis), at(middle + sizes[1] * axis)], colour, 12, opacity=0.3)
    else:
        angle = (
            -math.degrees(math.atan2(float(axes[1, 1]), float(axes[0, 1]))) if float(sizes[1] - sizes[0]) > 1e-9 else 0
        )
        angle = (angle + 90) % 180 - 90  # the sign of an axis means nothing
        rx, ry = (f"{unit * float(size):.1f}" for size in (sizes[1], sizes[0]))
        picture.add(
            f"<ellipse rx='{rx}' ry='{ry}' transform='translate({x0:.1f} {y0:.1f}) rotate({angle:.1f})' "
            f"fill='{colour}' fill-opacity='0.18' stroke='{colour}' stroke-width='1.5' stroke-dasharray='5 4'/>"
        )
    picture.dots([at(v) for v in plane.cloud], colour, dot)
    picture.add("</g>")
    if plane.start.any():
        picture.arrow([at((0, 0)), at(plane.start)], colour, 3, "4 3")
    picture.arrow([at((0, 0)), at(plane.g)], GREY, 3.5)
    picture.arrow([at((0, 0)), at(plane.mean)], colour, 2)
    picture.add(_diamond(*at(plane.cloud.mean(0)), colour))
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
            picture.add(
                f"<rect x='{x - 0.3 * step:.1f}' y='{bottom - tall:.1f}' width='{0.6 * step:.1f}' height='{tall:.1f}' fill='{colour}' "
                "fill-opacity='0.55'/>"
            )
    picture.dots([(x, bottom - unit * share) for x, share in zip(centres, bars.shares, strict=True)], GREY, 9, 1)
    for i, x in enumerate(centres):
        if i < OPEN or i == (OPEN + UNITS) // 2:
            picture.text((x, bottom + 17), str(i + 1) if i < OPEN else "off", anchor="middle", size=13)
    picture.text((left + 24, bottom + 36), "directions of W̃, strongest first", size=13)
    picture.text((left, 294), f"bias {bars.bias:.2f}, variance {bars.variance:.2f}", colour, bold=True)


def legend(picture: Picture, colour: str, bars: bool) -> None:
    """What the marks mean, in one row."""
    y = 318
    picture.arrow([(0, y - 5), (24, y - 5)], GREY, 3.5)
    picture.text((32, y), "gradient, length 1", size=13)
    picture.add(
        f"<ellipse cx='172' cy='{y - 5}' rx='12' ry='7' fill='{colour}' fill-opacity='0.18' stroke='{colour}' "
        "stroke-dasharray='4 3'/>"
    )
    picture.text((189, y), "directions (1 sd)", size=13)
    picture.dots([(308, y - 5), (314, y - 9), (318, y - 3)], colour, 5, 0.8)
    picture.text((326, y), f"{DRAWS} estimates", size=13)
    picture.add(_diamond(429, y - 5, colour))
    picture.text((440, y), "their mean", size=13)
    picture.arrow([(518, y - 5), (540, y - 5)], colour, 2)
    picture.text((548, y), "expected", size=13)
    if bars:
        picture.dots([(619, y - 5)], GREY, 9, 1)
        picture.text((628, y), "share of it²", size=13)


def _diamond(x: float, y: float, colour: str) -> str:
    return f"<path d='M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z' fill='{colour}' stroke='{GREY}' stroke-width='1.5'/>"


# --- pictures -------------------------------------------------------------------------------------------------


def of_guess(name: str, guess: Callable[[int], Guess], words: str) -> Picture:
    """The plane of a site with two units, and the directions of one with eight."""
    picture, colour = Picture(720, 330, words), colour_of(name)
    plane_panel(picture, guessed(guess(1)), colour, 0, "A site with 2 units")
    bars_panel(picture, guess(K), colour, 380, "8 units, 3 of them off: what is guessed")
    legend(picture, colour, bars=True)
    return picture


def of_weights(name: str, method: gg.WeightPerturbation | gg.baselines.MeZO, words: str) -> Picture:
    picture, colour = Picture(720, 330, words), colour_of(name)
    for left, count, title in ((0, 2, "A model with 2 parameters"), (380, 10, "2 of a model's 10 parameters")):
        plane_panel(picture, perturbed(method, count), colour, left, title, (0.42, 0.55), 22)
    legend(picture, colour, bars=False)
    return picture


def of_planes(name: str, planes: dict[str, Plane], words: str, dot: float = 5) -> Picture:
    """Two planes beside each other, by their titles."""
    picture, colour = Picture(720, 330, words), colour_of(name)
    for left, (title, plane) in zip((0, 380), planes.items(), strict=True):
        plane_panel(picture, plane, colour, left, title, (0.3, 0.66), dot=dot)
    legend(picture, colour, bars=False)
    return picture


def of_solvers() -> Picture:
    """The solvers of W⊥ on the same samples."""
    words = "W⊥ by its three solvers: svd and subspace agree, the shared basis is another subspace"
    picture, colour = Picture(720, 300, words), colour_of("wperp")
    for left, solver in ((0, "svd"), (245, "subspace"), (490, "shared")):
        bars_panel(picture, gg.WPerp(K, solver=solver), colour, left, f'solver="{solver}"', 1.3, 25)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "weight": lambda: of_weights(
        "weight",
        gg.WeightPerturbation(),
        "Weight perturbation: the cloud around the gradient grows with the parameters",
    ),
    "mezo": lambda: of_weights(
        "mezo", gg.baselines.MeZO(), "MeZO: the cloud around the gradient grows with the parameters"
    ),
    "activation": lambda: of_guess(
        "activation", lambda k: gg.ActivationPerturbation(), "Activation perturbation guesses all directions alike"
    ),
    "wt": lambda: of_guess(
        "wt", lambda k: gg.WTranspose(), "Wᵀ guesses directions as strongly as W̃ passes them, squared"
    ),
    "wperp": lambda: of_guess(
        "wperp", lambda k: gg.WPerp(k, solver="svd"), "W⊥ guesses the k strongest directions alike"
    ),
    "wperp-bottom": lambda: of_guess(
        "wperp-bottom", lambda k: gg.WPerp(k, end="bottom"), "W⊥-bottom guesses where no gradient lies"
    ),
    "wperp-ns": lambda: of_guess("wperp-ns", lambda k: gg.WPerpNS(k), "W⊥-NS guesses almost as W⊥ does"),
    "wp": lambda: of_guess("wp", lambda k: gg.WPreconditioned(), "Wᴾ guesses all directions alike where W̃ is square"),
    "wperp-solvers": of_solvers,
    "local-guess": lambda: of_planes(
        "local-guess",
        {
            "A student that points near the gradient": along_a_student(0.35),
            "A student that points elsewhere": along_a_student(1.2),
        },
        "A local guess: the estimate is the projection of the gradient on what a student says",
        dot=10,
    ),
    "feedback-corrected": lambda: of_planes(
        "feedback-corrected",
        {"Nothing learned: the guess alone": corrected(0), "After 3 lessons: around the prediction": corrected(3)},
        "Feedback, corrected: bias and variance fall as the prediction learns",
    ),
    **SCHEMATICS,
    "online-rules": of_rules,
}


def pictures() -> dict[str, str]:
    """Every picture as text, by the name of its file."""
    return {name: make().svg() for name, make in PICTURES.items()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
