"""Backpropagation, the reference, behind the same interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguess.guesses._base import Estimate, Method
from gradguess.sites import Site, Watch

if TYPE_CHECKING:
    from gradguess.step import Step


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

    def run(self, step: Step) -> Estimate:
        if step.detail:
            return self._with_sites(step)
        with torch.enable_grad(), step.one_pass():
            losses = step.task.losses(step.task.outputs())
            mean = losses.mean()
        names, parameters = _trainable(step)
        grads = torch.autograd.grad(mean, parameters, allow_unused=True)
        return _estimate(losses, dict(zip(names, grads, strict=True)))

    def _with_sites(self, step: Step) -> Estimate:
        outputs: dict[str, Tensor] = {}

        def watch(site: Site, x: Any, s: Tensor) -> Tensor:
            outputs[site.name] = s.clone()  # not s: a call may use one of its outputs for another (h of c in an LSTM)
            return outputs[site.name].clone()  # what follows may change its input in place

        with torch.enable_grad(), step.one_pass(), Watch(step.layout, watch):
            losses = step.task.losses(step.task.outputs())
            total = losses.sum()
        names, parameters = _trainable(step)
        found = torch.autograd.grad(total, [*outputs.values(), *parameters], allow_unused=True)
        at_sites, at_parameters = found[: len(outputs)], found[len(outputs) :]
        batch = len(losses)
        grads = {n: None if g is None else g / batch for n, g in zip(names, at_parameters, strict=True)}
        result = _estimate(losses, grads)
        result.site_grads = {
            name: torch.zeros_like(s) if g is None else g
            for (name, s), g in zip(outputs.items(), at_sites, strict=True)
        }
        return result


def _trainable(step: Step) -> tuple[list[str], list[Tensor]]:
    named = [(name, p) for name, p in step.task.model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [p for _, p in named]


def _estimate(losses: Tensor, grads: Mapping[str, Tensor | None]) -> Estimate:
    found = {name: g for name, g in grads.items() if g is not None}
    losses = losses.detach()
    return Estimate(losses.mean(), found, losses.new_zeros(0, len(losses)), losses=losses)
