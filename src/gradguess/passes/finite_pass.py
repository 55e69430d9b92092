"""Derivatives by central differences, for models through which no tangent can pass.

A plain pass draws the directions `y`. Two more move the output of every site at once, by `+h y` and by `-h y`. The
outputs then move by `2 h u`, with `u` their tangent. The loss is differentiated along `u` by dual numbers, since it is
known in closed form: its own rounding error would be divided by `h`. A loss without a formula is differenced as well.

The step `h` of a sample moves its activations by a part `ρ` of their size, all sites together:

    h = ρ / √(Σ_i (|y_i| / |s_i|)²),    ρ = ε^(2/5),    ε the rounding error of the products

The rounding error is `ε / ρ`. Where the model is smooth the central difference is off by `ρ²`, so that `ε^(1/3)` would
be best. A ReLU that opens or closes between the two passes has the mean of both slopes; such units make up a part of
about `ρ`, so that `ε^(1/2)` would be best. `ε^(2/5)` lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradguess.backends.policy import resolution
from gradguess.errors import InputError
from gradguess.guesses.factored import dense
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, LayoutChanged, Site, at_least_float32
from gradguess.model.task import Task, tensors
from gradguess.passes.forward_mode import dual_pass, is_missing_formula
from gradguess.passes.model_pass import Carried, Draw, Pass, Scale

POWER = 2 / 5  # of the rounding error
QUANTISED = 2.0**-7  # rounding error of layers in eight bits
INPUT_SHARE = 1 / 4  # a layer whose output is smaller than that part of its input counts as that large


@dataclass
class _Start:
    """The plain pass from which the directions lead away."""

    outputs: Any = None
    sizes: dict[str, Tensor] = field(default_factory=dict)  # of each site's output, root mean square, (batch,)
    before: dict[str, Tensor] = field(default_factory=dict)  # each site's output, where directions are scaled
    rounding: float = 0.0  # ε


class FinitePass(Pass):
    """The passes of `Pass`, with differences in place of dual numbers.

    Args:
        keep: the first plain pass may be kept for further directions.
        mixes: samples depend on each other, and need one step for all of them.
    """

    records_graphs = False

    def __init__(self, task: Task, layout: Layout, keep: bool, mixes: bool, *, aside: bool = False) -> None:
        super().__init__(task, layout, aside=aside)
        self.keep, self.mixes = keep, mixes
        self._kept: _Start | None = None
        modules = self.layout.members.modules
        if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            raise InputError(
                "derivative='finite' has a step for each process, and nn.SyncBatchNorm mixes the samples of all: use "
                "nn.BatchNorm, or another norm."
            )
        self._convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
        self._coarse = QUANTISED if any("quantized" in type(module).__module__ for module in modules) else 0.0

    def aside(self, task: Task | None = None) -> FinitePass:
        return FinitePass(task or self.task, self.layout, self.keep, self.mixes, aside=True)

    def tangent(self, draw: Draw, scale: Scale | None = None, cut: Visit | None = None) -> Carried:
        if scale is not None and not self.keep:
            raise InputError(
                "memory='replay' with derivative='finite' cannot balance directions, as Feedback and balance=True do: "
                "the tangent that arrives at a site is the difference to an output that was not kept. Use "
                "memory='store'."
            )
        start, ys = self._draw(draw, scale)
        h = self._step(start, ys, scale)

        def move(sign: int, site: Site, x: Any, s: Tensor) -> Tensor:
            y = ys[site.name]
            if y is None:
                return s
            if y.shape != s.shape:
                raise LayoutChanged
            step = _along(h, site.batch_dim, s)
            if sign > 0 and scale is not None:
                with torch.inference_mode(False), torch.no_grad():
                    arriving = at_least_float32(s) - at_least_float32(start.before[site.name])
                    y = ys[site.name] = scale(site, y, arriving / step)
            return _shifted(s, sign * step, y)

        return self._difference(start.outputs, h, *(self._moved(partial(move, sign)) for sign in (1, -1)))

    def parameter_tangent(self, directions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        own = {name: self.layout.members.parameters[name].detach() for name in directions}
        outputs = self.moved(None, first=True)
        size, length = (
            torch.stack([at_least_float32(t).norm() for t in ts]).norm() for ts in (own.values(), directions.values())
        )
        h = max(map(self._rounding, own.values())) ** POWER * torch.where(size > 0, size, 1.0) / length

        def shifted(sign: int) -> dict[str, Tensor]:
            return {name: _shifted(p, sign * h, directions[name]) for name, p in own.items()}

        carried = self._difference(outputs, h, *(self.moved(None, shifted(sign)) for sign in (1, -1)))
        return carried.losses, carried.jvp

    def _draw(self, draw: Draw, scale: Scale | None) -> tuple[_Start, dict[str, Tensor | None]]:
        """A plain pass, and the direction of every site."""
        if self._kept is not None:
            return self._kept, {site.name: dense(draw(site, None, None)) for site in self.layout.sites}  # type: ignore[arg-type]
        start, ys = _Start(), {}

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            ys[site.name] = dense(draw(site, x, s))
            start.sizes[site.name] = _size(site, x, s)
            start.rounding = max(start.rounding, self._rounding(s))
            if scale is not None:
                start.before[site.name] = s.clone()  # what follows may change s in place
            return s

        start.outputs = self.moved(visit, first=True)
        if self.keep:
            self._kept = start
        return start, ys

    def _rounding(self, t: Tensor) -> float:
        """`ε` of the products that make a tensor like `t`."""
        return max(self._coarse, resolution(t, self._convolves))

    def _step(self, start: _Start, ys: Mapping[str, Tensor | None], scale: Scale | None) -> Tensor:
        """`h`: (batch,), or one number where the samples, or outputs that they share, depend on each other."""
        rows = max(len(size) for size in start.sizes.values())
        apart = (
            self.layout.sliceable
            and not (self.mixes or self.layout.mutates)
            and all(site.batch_dim is not None for site in self.layout.sites)
            and all(out.dim() > 0 and len(out) == rows for out in tensors(start.outputs))
        )
        parts = []
        for site in self.layout.sites:
            y = ys[site.name]
            if y is not None:
                size, length = start.sizes[site.name], _rms(site.flat(y))
                size, length = (size, length) if apart else (_rms(size), _rms(length))
                parts.append(torch.where(size > 0, length / size, 0.0).square())
        if not parts:  # nothing moves
            return torch.ones(())
        # directions that are scaled follow the tangent that arrives: the first one sets the size of all
        total = parts[0] * len(parts) if scale is not None else torch.stack(parts).sum(0)
        return start.rounding**POWER * torch.where(total > 0, total.rsqrt(), 1.0)

    def _moved(self, visit: Visit) -> Any:
        try:
            return self.moved(visit)
        except LayoutChanged:
            raise InputError(
                "The model called other modules, or gave outputs of another shape, when its activations were moved a "
                "little: its control flow depends on them. derivative='finite' cannot follow that inside a site; name "
                "the modules around it with sites=[...]."
            ) from None

    def _difference(self, outputs: Any, h: Tensor, plus: Any, minus: Any) -> Carried:
        """What arrives at the end, from the outputs of the three passes."""
        pairs = zip(tensors(plus), tensors(minus), strict=True)
        wide = [(at_least_float32(a) - at_least_float32(b)) / (2 * _along(h, 0, a)) for a, b in pairs]
        tangents = [u.to(out.dtype) for u, out in zip(wide, tensors(outputs), strict=True)]
        losses, jvp = self._through_loss(outputs, tangents)
        if jvp is None:
            with torch.no_grad():
                above, below = (at_least_float32(self.task.losses(end)) for end in (plus, minus))
            jvp = (above - below) / (2 * h)
        return Carried(losses, jvp, outputs, tangents)

    def _through_loss(self, outputs: Any, tangents: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Losses and derivatives along the outputs' tangents; None where no tangent passes through the loss."""
        rest = iter(tangents)

        def dual(leaf: Any) -> Any:
            return fwAD.make_dual(leaf, next(rest)) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        try:
            with dual_pass(self.task.model):
                losses, jvp = fwAD.unpack_dual(self.task.losses(tree_map(dual, outputs)))
                return losses, jvp
        except (NotImplementedError, RuntimeError) as error:
            if not is_missing_formula(error):
                raise
        with torch.no_grad():
            return self.task.losses(outputs), None


def _rms(v: Tensor) -> Tensor:
    """The root mean square over the last dimension."""
    return torch.linalg.vector_norm(at_least_float32(v), dim=-1) / v.shape[-1] ** 0.5


def _size(site: Site, x: Any, s: Tensor) -> Tensor:
    """The size of a site's output, (batch,); of an adapter or a branch that is still near zero, that of its input."""
    size = _rms(site.flat(s))
    if isinstance(x, Tensor) and x.is_floating_point():
        size = torch.maximum(size, INPUT_SHARE * _rms(x.flatten()))
    return size


def _along(h: Tensor, dim: int | None, t: Tensor) -> Tensor:
    """`h`, to be multiplied with a tensor like `t` whose batch is dimension `dim`."""
    return h if h.dim() == 0 else h.reshape([-1 if i == dim else 1 for i in range(t.dim())])


def _shifted(t: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """`t + h y`, in the dtype of `t`."""
    return t + (h * y).to(t.dtype)
