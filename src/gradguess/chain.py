"""Passes in closed form, where the model is linear layers in a row with ReLUs between (`Layout.chain`).

    s_i = W_i x_i,  x_{i+1} = relu(s_i)        t_1 = y_1,  t_{i+1} = W_{i+1} D_i t_i + y_{i+1}

It is what the model and dual numbers compute (`gradguess.tangent.carry`), bit for bit, without their overhead; and
since a plain pass comes first, several tangents share it and all sites can be drawn from together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils._pytree import tree_map

from gradguess import kernels, tangent
from gradguess.rules import ClosedForms
from gradguess.scratch import NONE, Scratch
from gradguess.sites import Layout, LayoutChanged, Site, unrolled
from gradguess.tangent import Carried, dual_numbers, named_failures
from gradguess.task import Task, tensors

Direction = Callable[[Site, Tensor | None], Tensor | None]  # what is added to the tangent at a site
Act = Callable[[Site, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Stop:
    """A site as the plain pass saw it."""

    site: Site
    x: Tensor
    row: Tensor  # the output of the first sample; all of it would be twice the memory


@dataclass(frozen=True)
class Walked:
    """A plain pass that was run already: each site with its input and its output after the ReLU."""

    stops: list[tuple[Site, Tensor, Tensor]]
    outputs: Tensor
    gates: dict[str, Tensor] = field(default_factory=dict)  # those that came with the ReLU

    def first(self, rows: int) -> Walked:
        """The same for the first samples alone."""
        stops = [(site, x[:rows], s[:rows]) for site, x, s in self.stops]
        return Walked(stops, self.outputs[:rows], {name: gate[:rows] for name, gate in self.gates.items()})


def runs_itself(task: Task, layout: Layout) -> bool:
    """May the layers be run one by one? Not where the model must be called: no `Layout.row`, or it has hooks."""
    x = task.inputs
    if not layout.row or not isinstance(x, Tensor) or x.dim() != 2 or _altered(layout):
        return False
    weight: Tensor = layout.sites[0].module.weight  # type: ignore[assignment]
    return x.dtype == weight.dtype and x.device == weight.device and x.shape[1] == weight.shape[1]


def stroll(task: Task, layout: Layout, act: Act, scratch: Scratch = NONE) -> Tensor:
    """The plain pass, layer by layer: `act(site, x, s)` before each ReLU. `s` holds for two layers."""
    x = task.inputs
    with torch.no_grad():
        for i, site in enumerate(layout.sites):
            s = _linear(site, x, scratch, f"s{i % 2}")
            act(site, x, s)
            if site.gate is not None:
                s.relu_()
            x = s
    return x


def walk(task: Task, layout: Layout, scratch: Scratch = NONE, act: Act = lambda site, x, s: None) -> Walked:
    """The plain pass, layer by layer; it keeps every layer. `act(site, x, s)` after each ReLU."""
    stops: list[tuple[Site, Tensor, Tensor]] = []
    gates: dict[str, Tensor] = {}
    x = task.inputs
    with torch.no_grad():
        for site in layout.sites:
            s = _linear(site, x, scratch, f"{site.name}/s")
            if site.gate is not None and kernels.usable(s):
                gates[site.name] = kernels.rectify(s)
            elif site.gate is not None:
                s.relu_()
            stops.append((site, x, s))
            act(*stops[-1])
            x = s
    return Walked(stops, x, gates)


def gate(site: Site, s: Tensor, scratch: Scratch, name: str, walked: Walked | None = None) -> Tensor | None:
    """`D` of a site with output `s`, before or after its ReLU, in memory of this name; or as the pass left it."""
    if site.gate is None:
        return None
    if walked is not None and site.name in walked.gates:
        return walked.gates[site.name]
    return torch.gt(s, 0, out=scratch.like(name, s))


def _linear(site: Site, x: Tensor, scratch: Scratch, name: str) -> Tensor:
    weight, bias = site.module.weight, site.module.bias
    if site.top:  # the outputs outlive the step
        return nn.functional.linear(x, weight, bias)  # type: ignore[arg-type]
    out = scratch.take(name, x.shape[0], weight.shape[0], x)  # type: ignore
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)  # type: ignore


def _altered(layout: Layout) -> bool:
    """Has someone put a hook on the model, or another layer into it? Then it must be called."""
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        return True
    if any(a is not b for a, b in zip_longest(unrolled(layout.members.model), layout.row)):
        return True
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        for module, _ in layout.members.modules
    )


def check(stops: list[Stop]) -> None:
    """Did this batch take the path that the layout knows? Seen on its first sample."""
    if stops[0].row.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a captured step takes the path on which it was captured
    for below, above in pairwise(stops):
        s = below.row
        if not torch.equal(above.x[0], s if below.site.gate is None else s.clamp_min(0)) and bool(s.isfinite().all()):
            raise LayoutChanged


class _Tangent:
    """The tangent on its way from site to site: `t`, and `more` that joined it at the last one."""

    def __init__(self, scratch: Scratch) -> None:
        self.t: Tensor | None = None
        self.more: Tensor | None = None
        self.scratch = scratch
        self.gated = False  # is there a ReLU below? Its output x is positive where it let the tangent through
        self.odd = 0

    def meet(
        self, site: Site, x: Tensor, direction: Callable[[Tensor | None], Tensor | None], inside: bool = False
    ) -> None:
        """Go through the layer of `site`, then take up what `direction` gives for the tangent that arrives.

        `inside`: the ReLU that follows lets all of that through.
        """
        self.odd = 1 - self.odd
        if self.t is not None:
            self.t = _through(site, self._below(x), self.scratch, f"tangent{self.odd}")
        self.more = direction(self.t)
        self.gated = site.gate is not None
        if self.t is None:
            self.t, self.more = self.more, None
            if inside and self.t is not None and _aligned(self.t):
                self.gated = False

    def _below(self, x: Tensor) -> Tensor:
        """`D t`, before the layer with input `x`."""
        assert self.t is not None
        if self.gated and self.more is not None and kernels.usable(self.t):
            return kernels.meet(self.t, self.more, x)
        t = self.sum()
        if not self.gated or t is None:
            return self.t
        room = self.scratch.like("gated", t)
        return torch.ops.aten.threshold_backward.grad_input(t, x, 0, grad_input=room)

    def sum(self) -> Tensor | None:
        """All that has been taken up."""
        if self.t is not None and self.more is not None:
            self.t, self.more = self.t.add_(self.more), None
        return self.t


def _aligned(t: Tensor) -> bool:
    """Does it lie as a fresh tensor would? Products with others round differently."""
    return t.is_contiguous() and t.data_ptr() % 64 == 0


def carry(
    task: Task,
    stops: list[tuple[Site, Tensor]],
    outputs: Any,
    direction: Direction,
    scratch: Scratch = NONE,
    inside: Collection[str] = (),
) -> Carried:
    """The tangent pass after a plain one that met these sites with these inputs, and gave `outputs`.

    `inside`: the sites whose directions pass their gates whole.
    """
    moving = _Tangent(scratch)
    with torch.no_grad():
        for site, x in stops:
            moving.meet(site, x, partial(direction, site), site.name in inside)
        return _through_loss(task, outputs, moving.sum())


def carry_along(task: Task, layout: Layout, direction: tangent.Direction, scratch: Scratch = NONE) -> Carried:
    """`gradguess.tangent.carry` in closed form: plain and tangent pass side by side, nothing is kept."""
    moving = _Tangent(scratch)
    outputs = stroll(task, layout, lambda site, x, s: moving.meet(site, x, lambda t: direction(site, x, s, t)), scratch)
    with torch.no_grad():
        return _through_loss(task, outputs, moving.sum())


def _through(site: Site, t: Tensor, scratch: Scratch, name: str) -> Tensor:
    """`W t`, in memory of this name."""
    weight: Tensor = site.module.weight  # type: ignore[assignment]
    if site.top:  # the outputs' tangent outlives the pass
        return torch.mm(t, weight.t())
    return torch.mm(t, weight.t(), out=scratch.take(name, t.shape[0], weight.shape[0], t))


def _through_loss(task: Task, outputs: Any, t: Tensor | None) -> Carried:
    (end,) = tensors(outputs)
    u = torch.zeros_like(end) if t is None else t
    with named_failures(task), torch.no_grad(), dual_numbers(), ClosedForms() if end.is_cuda else nullcontext():
        dual = fwAD.make_dual(end, u)
        seen = tree_map(lambda leaf: dual if leaf is end else leaf, outputs)
        losses, jvp = fwAD.unpack_dual(task.losses(seen))
        jvp = torch.zeros_like(losses) if jvp is None else jvp
    return Carried(losses, jvp, outputs, [u])
