"""Backpropagation, the reference, behind the same interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguess.methods.base import Estimate, Method
from gradguess.model.site import Site
from gradguess.model.task import check_differentiable
from gradguess.step.base import State, Step


@dataclass(frozen=True)
class Backprop(Method):
    """The gradient itself, by reverse mode. Bias and variance none; memory grows with depth. No tangents.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Linear(4, 3)
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.Backprop(), loss_fn, x, t)
    >>> loss_fn(model(x), t).mean().backward()
    >>> torch.allclose(est.grads["weight"], model.weight.grad)
    True
    """

    one_pass = True

    def run(self, step: Step) -> tuple[Estimate, State]:
        outputs: dict[str, Tensor] = {}

        def watch(site: Site, x: Any, s: Tensor) -> Tensor:
            outputs[site.name] = s.clone()  # not s: a call may use one of its outputs for another (h of c in an LSTM)
            return outputs[site.name].clone()  # what follows may change its input in place

        _, losses = step.passes.graph(watch if step.detail else None, fused=True)
        check_differentiable(losses)
        with torch.enable_grad():
            total = losses.sum()
        own = {name: p for name, p in step.layout.members.parameters.items() if p.requires_grad}
        found = torch.autograd.grad(total, [*outputs.values(), *own.values()], allow_unused=True)
        batch, losses = len(losses), losses.detach()
        grads = {name: g / batch for name, g in zip(own, found[len(outputs) :], strict=True) if g is not None}
        result = Estimate(losses.mean(), grads, losses.new_zeros(0, batch), losses=losses)
        result.site_grads = {
            name: torch.zeros_like(s) if g is None else g for (name, s), g in zip(outputs.items(), found, strict=False)
        }
        return result, step.state
