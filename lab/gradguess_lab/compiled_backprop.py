"""Backpropagation as anyone would compile it: `torch.compile` of the forward pass with its loss, and autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.methods.base import Estimate, Method
from gradguess.model.task import LossFn
from gradguess.step.base import State, Step

Losses = Callable[[nn.Module, LossFn, Tensor, Tensor], Tensor]


def losses(model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor) -> Tensor:
    """One loss per sample."""
    return loss_fn(model(x), y)


@dataclass
class CompiledBackprop(Method):
    """`gg.Backprop` with a compiled pass. `gg.ForwardGradient(compile=True)` traces a step of it instead.

    Where PyTorch cannot compile, it warns once and differentiates uncompiled.
    """

    uses_sites = False
    compiled: Losses | None = field(default_factory=lambda: torch.compile(losses, fullgraph=True, dynamic=False))

    def run(self, step: Step) -> tuple[Estimate, State]:
        task = step.task
        try:
            with torch.enable_grad():
                found = self.compiled(task.model, task.loss_fn, task.inputs, task.targets) if self.compiled else None
        except Exception as error:  # no compiler on this machine, for instance
            self.compiled = found = None
            why = (str(error).splitlines() or [""])[0][:200]
            warnings.warn(f"compile=True has no effect. torch.compile: {why} Steps run uncompiled.", stacklevel=2)
        if found is None:
            return gg.Backprop().run(replace(step, detail=False))
        own = {name: p for name, p in step.layout.members.parameters.items() if p.requires_grad}
        with torch.enable_grad():
            loss = found.mean()
        every = zip(own, torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True)
        grads = {name: g for name, g in every if g is not None}
        return Estimate(loss.detach(), grads, found.new_zeros(0, len(found)), losses=found.detach()), step.state
