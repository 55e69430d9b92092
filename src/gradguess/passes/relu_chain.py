"""Passes in closed form over an `nn.Sequential` of linear layers and ReLUs. Only `choose` knows of this file.

    s_i = W_i x_i,  x_{i+1} = relu(s_i)        t_1 = y_1,  t_{i+1} = W_{i+1} D_i t_i + y_{i+1}

It is what the model and dual numbers compute (`module_pass`), without their overhead. Several tangents share one plain
pass. Measured on one core at width 64, what the whole step takes longer without it: W⊥ 18 %, Wᵀ 24 %; at width 512 it
is 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, zip_longest
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.nn.modules import module as _module

from gradguess.layers.elementwise import mask
from gradguess.layers.tangents import TangentRules
from gradguess.model.site import Layout, Site
from gradguess.model.task import Task
from gradguess.passes.base import Carried, Draw, Observe, Piece, Scale
from gradguess.passes.forward_mode import dual_numbers, named_failures, unpack_dual
from gradguess.passes.module_pass import ModulePass

Seen = list[tuple[Site, Tensor]]  # every site with the input of its layer


class ReluChainPass(ModulePass):
    """With `keep`, the inputs of all layers are kept from the first pass on."""

    def __init__(self, task: Task, layout: Layout, keep: bool) -> None:
        super().__init__(task, layout)
        self.keep = keep
        self._kept: tuple[Seen, Tensor] | None = None  # the plain pass that came with the first tangents

    @staticmethod
    def fits(task: Task, layout: Layout) -> bool:
        """Is the model such a sequence, as it was when its sites were found, and its input a plain batch of rows?"""
        if not _layers(layout):
            return False
        x, weight = task.inputs, _weight(layout.sites[0])
        if weight.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(weight.device.type):
            return False
        if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype != weight.dtype or x.device != weight.device:
            return False
        return x.shape[1] == weight.shape[1] and not _altered(layout)

    def plain(self, observe: Observe) -> Tensor:
        return self._walk(observe)[1]

    def tangent(self, draw: Draw, scale: Scale | None = None, piece: Piece | None = None) -> Carried:
        moving = _Tangent(scale)
        if not self.keep:
            _, outputs = self._walk(lambda site, x, s: moving.advance(site, x, draw(site, x, s)))
            return self._through_loss(outputs, moving.t)
        ys: list[Tensor | None] = []
        if self._kept is not None:
            ys = [draw(site, x, None) for site, x in self._kept[0]]  # type: ignore[arg-type]
        else:
            self._kept = self._walk(lambda site, x, s: ys.append(draw(site, x, s)))
        seen, outputs = self._kept
        for (site, x), y in zip(seen, ys, strict=True):
            moving.advance(site, x, y)
        return self._through_loss(outputs, moving.t)

    def _walk(self, act: Observe) -> tuple[Seen, Tensor]:
        """One plain pass, `act(site, x, s)` at every site; every site with the input of its layer, and the outputs."""
        seen: Seen = []
        x = self.task.inputs
        with torch.no_grad():
            for site in self.layout.sites:
                s = nn.functional.linear(x, _weight(site), site.module.bias)  # type: ignore[arg-type]
                act(site, x, s)
                if self.keep:
                    seen.append((site, x))
                x = s if site.gate is None else s.relu()
        return seen, x

    def _through_loss(self, outputs: Tensor, t: Tensor | None) -> Carried:
        u = torch.zeros_like(outputs) if t is None else t
        with torch.no_grad(), named_failures(self.task), dual_numbers(), TangentRules():
            losses, jvp = unpack_dual(self.task.losses(fwAD.make_dual(outputs, u)))
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


_LAYERS: WeakKeyDictionary[Layout, tuple[nn.Module, ...]] = WeakKeyDictionary()


def _layers(layout: Layout) -> tuple[nn.Module, ...]:
    """The layers, where the model is a sequence of linear layers, ReLUs and identities; else nothing."""
    if layout not in _LAYERS:
        layers = tuple(_unrolled(layout.members.model))
        first = next((layer for layer in layers if type(layer) is not nn.Identity), None)
        plain = all(type(layer) in (nn.Linear, nn.ReLU, nn.Identity) for layer in layers)
        same = [layer for layer in layers if type(layer) is nn.Linear] == [site.module for site in layout.sites]
        _LAYERS[layout] = layers if plain and same and type(first) is nn.Linear and _is_chain(layout) else ()
    return _LAYERS[layout]


def _is_chain(layout: Layout) -> bool:
    """Does every layer lead to the next by a ReLU or nothing, and the last to the outputs? Are all gradients known?"""
    return (
        len(layout.sites) > 1
        and layout.has_closed_gradients
        and not layout.leaves_traces
        and layout.sites[-1].is_output
        and layout.sites[-1].gate is None
        and layout.sites[-1].batch_dim == 0
        and all(site.linear is above.module and site.gate in (None, mask) for site, above in pairwise(layout.sites))
    )


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
    if any(a is not b for a, b in zip_longest(_unrolled(layout.members.model), _layers(layout))):
        return True
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        for module in layout.members.modules
    )
