"""The output error `e`: the derivative of each sample's loss with respect to the model's outputs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.errors import InputError
from gradguess.layers.positions import coded
from gradguess.model.site import at_least_float32
from gradguess.model.task import Task, tensors


class OutputError:
    """`e`, by a vjp of the loss alone.

    Attributes:
        losses: (batch,).
        parts: one tensor for each floating-point tensor among the outputs.
        exact: all of it as (batch, C).
        flat: the same with a large alphabet projected, as the predictor sees it.
    """

    def __init__(self, task: Task, outputs: Any) -> None:
        leaves, spec = tree_flatten(outputs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        free = {i: leaves[i].detach().requires_grad_() for i in places}
        with torch.enable_grad():
            losses = task.losses(tree_unflatten([free.get(i, leaf) for i, leaf in enumerate(leaves)], spec))
            grads = torch.autograd.grad(losses.sum(), list(free.values()), allow_unused=True)
        self.losses = losses.detach()
        self.parts = [torch.zeros_like(free[i]) if g is None else g for i, g in zip(places, grads, strict=True)]

    @cached_property
    def exact(self) -> Tensor:
        return flatten_outputs(self.parts)

    @cached_property
    def flat(self) -> Tensor:
        return flatten_outputs([coded(part) for part in self.parts])

    def pull(self, outputs: Any, leaves: list[Tensor]) -> list[Tensor]:
        """The exact gradients at leaves from which the graph goes on to the outputs alone."""
        pairs = self.seeds(outputs)
        if not leaves or not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        return pull([end for end, _ in pairs], leaves, [seed for _, seed in pairs])

    def seeds(self, outputs: Any) -> list[tuple[Tensor, Tensor]]:
        """The outputs that have a graph, each with the error there."""
        found = zip(tensors(outputs), self.parts, strict=True)
        return [(out, part.to(out.dtype)) for out, part in found if out.requires_grad]


def pull(ends: list[Tensor], leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    """A vjp; zero where no path leads."""
    grads = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


def flatten_outputs(parts: list[Tensor]) -> Tensor:
    """(batch, C) from one or several output tensors."""
    if any(part.dim() == 0 for part in parts):
        raise InputError(
            "Feedback expects outputs with one row per sample, found a scalar among them. Is it a loss of the model's "
            "own? Then leave the labels out of the inputs."
        )
    flats = [part.reshape(part.shape[0], -1) for part in parts]
    return at_least_float32(flats[0] if len(flats) == 1 else torch.cat(flats, 1))
