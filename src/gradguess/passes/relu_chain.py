"""Passes in closed form over linear layers in a row with ReLUs between them. Only `choose` knows of this file.

    s_i = W_i x_i,  x_{i+1} = relu(s_i)        t_1 = y_1,  t_{i+1} = W_{i+1} D_i t_i + y_{i+1}

It is what the model and dual numbers compute (`module_pass`), without their overhead. Several tangents share one plain
pass. Measured: W⊥ on a network of width 64 takes 2.7 steps of backpropagation with it and 4.3 without it on two cores;
at width 512 it is 1.25 and 1.44.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils._pytree import tree_map

from gradguess.backends.cuda_graphs import recording
from gradguess.backends.policy import fuses_losses
from gradguess.backends.streams import side_by_side, waits_for_jobs
from gradguess.layers.elementwise import mask
from gradguess.layers.tangents import TangentRules
from gradguess.model.site import Layout, LayoutChanged, Site
from gradguess.model.task import Task, tensors
from gradguess.passes.base import Carried, Draw, Observe, Piece, Scale
from gradguess.passes.forward_mode import dual_numbers, named_failures
from gradguess.passes.module_pass import ModulePass

Seen = list[tuple[Site, Tensor]]  # every site with the input of its layer


class ReluChainPass(ModulePass):
    """With `keep`, the inputs of all layers are kept from the first pass on."""

    def __init__(self, task: Task, layout: Layout, keep: bool) -> None:
        super().__init__(task, layout)
        self.keep = keep
        self._kept: tuple[Seen, Any] | None = None  # the plain pass that came with the first tangents

    @staticmethod
    def fits(task: Task, layout: Layout, keep: bool) -> bool:
        """Is the model such a chain, and may its layers be run one by one, or its inputs be kept?"""
        if not _is_chain(layout) or _has_hooks(layout):
            return False
        weight = _weight(layout.sites[0])
        if weight.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(weight.device.type):
            return False
        return keep or _runs_by_layers(task, layout)

    def plain(self, observe: Observe) -> Any:
        return self._walk(observe)[1]

    def tangent(self, draw: Draw, scale: Scale | None = None, piece: Piece | None = None) -> Carried:
        moving = _Tangent(scale)
        if not self.keep:
            _, outputs = self._walk(lambda site, x, s: moving.advance(site, x, draw(site, x, s)))
            return self._through_loss(outputs, moving.t)
        device, ys = _weight(self.layout.sites[0]).device, []
        if self._kept is not None:
            ys = [draw(site, x, None) for site, x in self._kept[0]]  # type: ignore[arg-type]
        elif waits_for_jobs(device):
            jobs: list[Callable[[], Tensor | None]] = []
            safe = _runs_by_layers(
                self.task, self.layout
            )  # else the model may change s in place before it is drawn from
            put = lambda site, x, s: jobs.append(partial(draw, site, x, s if safe else s.clone()))  # noqa: E731
            self._kept = self._walk(put)
            ys = side_by_side(device, jobs)
        else:
            self._kept = self._walk(lambda site, x, s: ys.append(draw(site, x, s)))
        seen, outputs = self._kept
        for (site, x), y in zip(seen, ys, strict=True):
            moving.advance(site, x, y)
        return self._through_loss(outputs, moving.t)

    def _walk(self, act: Observe) -> tuple[Seen, Any]:
        """One plain pass, `act(site, x, s)` at every site; every site with the input of its layer, and the outputs."""
        seen: Seen = []
        if not _runs_by_layers(self.task, self.layout):
            return seen, self._call_model(act, seen)
        x = self.task.inputs
        with torch.no_grad():
            for site in self.layout.sites:
                s = nn.functional.linear(x, _weight(site), site.module.bias)  # type: ignore[arg-type]
                act(site, x, s)
                if self.keep:
                    seen.append((site, x))
                x = s if site.gate is None else s.relu()
        return seen, x

    def _call_model(self, act: Observe, seen: Seen) -> Any:
        """The same by calling the model. The first sample tells whether the model ran as the layout says."""
        rows: list[Tensor] = []

        def note(site: Site, x: Any, s: Tensor) -> None:
            rows.append(s[0].clone())
            seen.append((site, x))
            act(site, x, s)

        outputs = super().plain(note)
        for ((below, _), (_, x)), s in zip(pairwise(seen), rows, strict=False) if not recording() else ():
            if not torch.equal(x[0], s if below.gate is None else s.clamp_min(0)) and bool(s.isfinite().all()):
                raise LayoutChanged
        return outputs

    def _through_loss(self, outputs: Any, t: Tensor | None) -> Carried:
        (end,) = tensors(outputs)
        u = torch.zeros_like(end) if t is None else t
        rules = TangentRules() if fuses_losses(end) else nullcontext()
        with torch.no_grad(), named_failures(self.task), dual_numbers(), rules:
            dual = fwAD.make_dual(end, u)
            seen = tree_map(lambda leaf: dual if leaf is end else leaf, outputs)
            losses, jvp = fwAD.unpack_dual(self.task.losses(seen))
            jvp = torch.zeros_like(losses) if jvp is None else jvp
        return Carried(losses, jvp, outputs, [u])


class _Tangent:
    """The tangent `t` on its way from layer to layer."""

    def __init__(self, scale: Scale | None) -> None:
        self.scale = scale
        self.t: Tensor | None = None
        self.gated = False  # is there a ReLU above the last site?

    @torch.no_grad()
    def advance(self, site: Site, x: Tensor, y: Tensor | None) -> None:
        """Go through the layer of `site`, whose input is `x`, and take up the direction `y`."""
        t = self.t
        if t is not None:
            if self.gated:  # the ReLU's output x is positive where it lets the tangent through
                t = torch.ops.aten.threshold_backward(t, x, 0)
            t = t @ _weight(site).t()
        if y is not None and self.scale is not None:
            y = self.scale(site, y, t)
        if t is None or y is None:
            self.t = y if t is None else t
        else:
            self.t = t.add_(y)
        self.gated = site.gate is not None


def _weight(site: Site) -> Tensor:
    return site.module.weight  # type: ignore[return-value]


_CHAINS: WeakKeyDictionary[Layout, bool] = WeakKeyDictionary()  # which layouts are chains
_ROWS: WeakKeyDictionary[Layout, tuple[nn.Module, ...]] = (
    WeakKeyDictionary()
)  # their layers, where these can be unrolled


def _is_chain(layout: Layout) -> bool:
    """Linear layers in a row, ReLUs between them, the last one's output the model's own; nothing random."""
    if layout not in _CHAINS:
        _CHAINS[layout] = (
            len(layout.sites) > 1
            and layout.has_closed_gradients
            and not layout.leaves_traces
            and layout.sites[-1].is_output
            and layout.sites[-1].gate is None
            and layout.sites[-1].batch_dim == 0
            and all(_leads_to(site, above) for site, above in pairwise(layout.sites))
        )
    return _CHAINS[layout]


def _has_hooks(layout: Layout) -> bool:
    """Is there a hook, or another `forward`, that may change the output of a layer?"""
    if _module._global_forward_hooks:
        return True
    return any(site.module._forward_hooks or "forward" in site.module.__dict__ for site in layout.sites)


def _leads_to(site: Site, above: Site) -> bool:
    plain = type(site.module) is nn.Linear and site.linear is above.module and site.above == (above.name,)
    return plain and site.gate in (None, mask)


def _runs_by_layers(task: Task, layout: Layout) -> bool:
    """Is the model an `nn.Sequential` of these layers, without hooks, and is its input a plain batch of rows?"""
    x, weight = task.inputs, _weight(layout.sites[0])
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype != weight.dtype or x.device != weight.device:
        return False
    return x.shape[1] == weight.shape[1] and bool(_row(layout)) and not _altered(layout)


def _row(layout: Layout) -> tuple[nn.Module, ...]:
    """The layers, where the model is an `nn.Sequential` of linear layers, ReLUs and identities; else nothing."""
    if layout not in _ROWS:
        layers = list(_unrolled(layout.members.model))
        plain = all(type(layer) in (nn.Linear, nn.ReLU, nn.Identity) for layer in layers)
        same = [layer for layer in layers if type(layer) is nn.Linear] == [site.module for site in layout.sites]
        _ROWS[layout] = tuple(layers) if plain and same else ()
    return _ROWS[layout]


def _unrolled(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`s, in the order in which they are called."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _unrolled(child)
    else:
        yield module


def _altered(layout: Layout) -> bool:
    """Has someone put a hook on the model, or another layer into it? Then it must be called."""
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        return True
    if any(a is not b for a, b in zip_longest(_unrolled(layout.members.model), _row(layout))):
        return True
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        for module, _ in layout.members.modules
    )
