"""The tangent pass in closed form, where the model is linear layers in a row with ReLUs between (`Layout.chain`).

    t_1 = y_1,    t_{i+1} = W_{i+1} D_i t_i + y_{i+1}

It is what dual numbers compute (`gradguess.tangent.carry`), bit for bit, without their overhead; and since one plain
pass comes first, several tangents share it and all sites can be drawn from together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.utils._pytree import tree_map

from gradguess.sites import LayoutChanged, Site
from gradguess.tangent import Carried, dual_numbers, named_failures
from gradguess.task import Task, tensors

Direction = Callable[[Site, Tensor | None], Tensor | None]  # what is added to the tangent at a site


@dataclass(frozen=True)
class Stop:
    """A site as the plain pass saw it."""

    site: Site
    x: Tensor
    row: Tensor  # the output of the first sample; all of it would be twice the memory


def check(stops: list[Stop]) -> None:
    """Did this batch take the path that the layout knows? Seen on its first sample."""
    if stops[0].row.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a captured step takes the path on which it was captured
    for below, above in pairwise(stops):
        s = below.row
        if not torch.equal(above.x[0], s if below.site.gate is None else s.clamp_min(0)) and bool(s.isfinite().all()):
            raise LayoutChanged


def carry(task: Task, stops: list[Stop], outputs: Any, direction: Direction) -> Carried:
    """The tangent pass after a plain one that met `stops` and gave `outputs`."""
    t: Tensor | None = None
    gated = False  # is there a ReLU below? Its output x is positive where it let the tangent through
    with torch.no_grad():
        for stop in stops:
            if t is not None:
                t = torch.ops.aten.threshold_backward(t, stop.x, 0) if gated else t
                t = torch.mm(t, stop.site.module.weight.t())  # type: ignore[operator]
            y = direction(stop.site, t)
            if y is not None:
                t = y if t is None else t.add_(y)
            gated = stop.site.gate is not None
    return _through_loss(task, outputs, t)


def _through_loss(task: Task, outputs: Any, t: Tensor | None) -> Carried:
    (end,) = tensors(outputs)
    u = torch.zeros_like(end) if t is None else t
    with named_failures(task), torch.no_grad(), dual_numbers():
        dual = fwAD.make_dual(end, u)
        seen = tree_map(lambda leaf: dual if leaf is end else leaf, outputs)
        losses, jvp = fwAD.unpack_dual(task.losses(seen))
        jvp = torch.zeros_like(losses) if jvp is None else jvp
    return Carried(losses, jvp, outputs, [u])
