"""What each online rule takes the influence of the parameters on the state to be, as small maps."""

from __future__ import annotations

import math

import torch
from method_pictures.svg import GREY, Picture, colour_of
from torch import Tensor, nn

import gradguess as gg

UNITS, INPUTS, STEPS = 6, 3, 12
RULES = {
    "RTRL": ("exact: all of it", gg.online.RTRL()),
    "WPerp, k = 3": ("3 of 6 directions", gg.online.WPerp(3)),
    "Completed": ("3 directions, and SnAp", gg.online.Completed(gg.online.WPerp(3))),
    "SnAp": ("own unit, then one hop", gg.online.SnAp(1)),
    "UORO": ("rank one, unbiased", gg.online.UORO()),
    "RFLO": ("fading, fed at random", gg.online.RFLO()),
    "EProp": ("here the last 2 steps", gg.online.EProp()),
    "TBPTT, 4 steps": ("the last 4 steps", gg.online.TBPTT(4)),
    "OneStep": ("the last step", gg.online.OneStep()),
}
LEVELS = 6  # shades of a map


def influence(rule: gg.online.Rule) -> Tensor:
    """`dh_T/dθ` as a rule has it, (units, parameters): row j is the gradient of a loss that is unit j's state."""
    source = torch.Generator().manual_seed(3)
    cell = nn.RNNCell(INPUTS, UNITS, bias=False).double()
    for p in cell.parameters():
        square = torch.randn(UNITS, UNITS, generator=source, dtype=torch.float64)
        p.data = 0.9 * torch.linalg.qr(square)[0][:, : p.shape[1]]
    xs = 0.5 * torch.randn(STEPS, 1, INPUTS, generator=source, dtype=torch.float64)
    online = gg.online.Online(gg.online.Recurrent(cell, nn.Identity()), rule, seed=0)
    for x in xs[:-1]:
        online(None, x)
    before, rows = online.state_dict(), []
    for unit in torch.eye(UNITS, dtype=torch.float64).split(1):
        online.load_state_dict(before)
        cell.zero_grad()
        online(lambda output, target: (output * target).sum(1), xs[-1], unit)
        rows.append(torch.cat([p.grad.reshape(-1) for p in cell.parameters()]))
    return torch.stack(rows)


def of_rules() -> Picture:
    """A map for each rule, darker where the influence is larger, with its cosine to the exact one."""
    height = 78 * math.ceil(len(RULES) / 2) + 18  # two in a row, and the line below
    picture = Picture(720, height, "The influence of the parameters on the state, as each online rule has it")
    exact = influence(gg.online.RTRL())
    top = float(exact.abs().quantile(0.97))
    colours = {"WPerp, k = 3": colour_of("wperp")}
    for place, (name, (words, rule)) in enumerate(RULES.items()):
        left, high = 370 * (place % 2), 78 * (place // 2)
        P, colour = exact if place == 0 else influence(rule), colours.get(name, colour_of("activation"))
        cosine = float((P * exact).sum() / (P.norm() * exact.norm()))
        picture.text((left, high + 16), name, colour, bold=True)
        picture.text((left + 130, high + 16), words, size=13)
        picture.text((left + 350, high + 16), f"cos {cosine:.2f}", colour, "end", 13)
        _map(picture, P / top, left, high + 22, 350 / P.shape[1], 8, colour)
    picture.text((0, height - 2), "rows: 6 units; columns: 54 weights; cos: to the exact influence", size=13)
    return picture


def _map(picture: Picture, P: Tensor, left: float, top: float, wide: float, tall: float, colour: str) -> None:
    """Cells in a few shades, one path for each shade."""
    picture.box((left, top), (wide * P.shape[1], tall * P.shape[0]), GREY, width=0.7)
    shade = (P.abs().clamp(max=1) * LEVELS).round().int()
    for level in range(1, LEVELS + 1):
        cells = (shade == level).nonzero().tolist()
        if cells:
            d = "".join(
                f"M{left + wide * j:.1f} {top + tall * i:.0f}h{wide:.1f}v{tall:.0f}h-{wide:.1f}z" for i, j in cells
            )
            picture.add(f"<path d='{d}' fill='{colour}' fill-opacity='{level / LEVELS:.2f}'/>")
