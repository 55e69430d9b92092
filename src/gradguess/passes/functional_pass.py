"""Passes that can be traced into a graph: forward mode by `torch.func.jvp`, which a trace can see through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from gradguess.backends.tracing import traced_autograd
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, Site
from gradguess.model.task import Task, tensors
from gradguess.passes.base import Carried, Draw, Piece, Scale
from gradguess.passes.forward_mode import formula_kernels, named_failures, quiet_jvp, tangent_rules
from gradguess.passes.module_pass import ModulePass


def _written(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a pass may write: those of modules in training mode. No tangent may touch the others."""
    modules = dict(model.named_modules())
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and modules[name.rpartition(".")[0]].training
    }


class _Known(torch.autograd.Function):
    """`_Known.apply(s, value)`: a value that is known, with the graph of the tensor that has it up to rounding."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class FunctionalPass(ModulePass):
    """The passes of `ModulePass`, with the buffers of the model as arguments and results of the transform.

    A pass with a reverse graph takes the outputs of sites from the tangent pass before it, so that a trace has less to
    compute: other kernels may have made them.
    """

    gives_pieces = False  # a trace merges the second pass with the first

    def __init__(self, task: Task, layout: Layout) -> None:
        super().__init__(task, layout)
        self._first: dict[str, Tensor] | None = None  # the buffers before the first pass
        self._outputs: dict[str, tuple[Tensor, int]] = {}  # of the sites, in the last tangent pass, and their versions

    def tangent(self, draw: Draw, scale: Scale | None = None, piece: Piece | None = None) -> Carried:
        def noting(site: Site, x: Any, s: Tensor) -> Tensor | None:
            self._outputs[site.name] = s.detach(), s._version
            return draw(site, x, s)

        outputs, losses, output_tangents, jvp = self._forward(lambda: self._run(self._injecting(noting, scale, set())))
        return Carried(losses, jvp, outputs, output_tangents)

    def parameter_tangent(self, directions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def run() -> Any:
            own = self.layout.members.parameters
            return self._run(None, {name: fwAD.make_dual(own[name].detach(), y) for name, y in directions.items()})

        _, losses, _, jvp = self._forward(run)
        return losses, jvp

    @contextmanager
    def _one_pass(self, last: bool = False) -> Iterator[None]:
        """Every pass starts from the same buffers. Those that the first one leaves are kept."""
        model = self.task.model
        if not self.layout.mutates:
            yield
        elif self._first is None:
            self._first = {name: buffer.clone() for name, buffer in model.named_buffers()}
            yield
        else:
            with _reparametrize_module(model, {name: buffer.clone() for name, buffer in self._first.items()}):
                yield

    def aside(self, task: Task | None = None) -> FunctionalPass:
        other = FunctionalPass(task or self.task, self.layout)
        other._first = {name: buffer.clone() for name, buffer in self.task.model.named_buffers()}
        return other

    def graph(
        self, visit: Visit | None = None, *, fused: bool = False, twice: bool = False, last: bool = False
    ) -> tuple[Any, Tensor]:
        def known(site: Site, x: Any, s: Tensor) -> Tensor:
            assert visit is not None
            value, version = self._outputs.get(site.name, (None, 0))
            return visit(site, x, s if value is None or value._version != version else _Known.apply(s, value))

        with traced_autograd(), formula_kernels(self.task.model, attention=False):  # no trace sees through the others
            return super().graph(visit and known, fused=fused, twice=twice, last=last)

    def _forward(self, run: Callable[[], Any]) -> tuple[Any, Tensor, list[Tensor], Tensor]:
        """The outputs that `run` returns, losses, and the tangents of both."""
        model, outputs = self.task.model, None

        def function(open_level: Tensor, *values: Tensor) -> Any:
            own = dict(zip(buffers, values, strict=True))
            own |= {name: count.clone() for name, count in counts.items()}  # a transform writes to its own alone
            nonlocal outputs
            with _reparametrize_module(model, own):
                outputs = run()
                losses = self.task.losses(outputs)
                now = dict(model.named_buffers())
                written = [now[name] for name in own]
            return losses, tensors(outputs), written

        zero = next(model.parameters()).new_zeros(())
        with (
            self._one_pass(),
            named_failures(self.task),
            torch.no_grad(),
            formula_kernels(model),
            tangent_rules(model),
        ):
            buffers = _written(model)
            counts = {name: b for name, b in model.named_buffers() if not (b.is_floating_point() or b.is_complex())}
            primals = (zero, *buffers.values())
            tangents = (torch.ones_like(zero), *(torch.zeros_like(b) for b in buffers.values()))
            made: Any = quiet_jvp(function, primals, tangents)
            (losses, floating, written), (jvp, output_tangents, _) = made
            for buffer, value in zip((buffers | counts).values(), written, strict=True):
                buffer.copy_(value)
        found = iter(floating)
        values = tree_map_only(Tensor, lambda t: next(found) if t.is_floating_point() else t, outputs)
        return values, losses, list(output_tangents), jvp
