"""The output error `e`: the derivative of each sample's loss with respect to the model's outputs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradguess.errors import InputError
from gradguess.layers.positions import project_words
from gradguess.model.site import at_least_float32
from gradguess.model.task import Task, check_differentiable, tensors
from gradguess.step.pull_back import pull


class OutputError:
    """`e`, by a vjp of the loss alone.

    Attributes:
        losses: (batch,).
        parts: one tensor for each floating-point tensor among the outputs.
        exact: all of it as (batch, C).
        flat: the same with a large alphabet projected, as the predictor sees it.
    """

    def __init__(self, task: Task, outputs: Any) -> None:
        free = tree_map_only(Tensor, _freed, outputs)
        with torch.enable_grad():
            losses = task.losses(free)
        check_differentiable(losses)
        self.losses, self.parts = losses.detach(), pull([losses], tensors(free))

    @cached_property
    def exact(self) -> Tensor:
        return flatten_outputs(self.parts)

    @cached_property
    def flat(self) -> Tensor:
        return flatten_outputs([project_words(part) for part in self.parts])


def _freed(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def flatten_outputs(parts: list[Tensor]) -> Tensor:
    """(batch, C) from one or several output tensors."""
    if any(part.dim() == 0 for part in parts):
        raise InputError(
            "Feedback expects outputs with one row per sample, found a scalar among them. Is it a loss of the model's "
            "own? Then leave the labels out of the inputs."
        )
    flats = [part.reshape(part.shape[0], -1) for part in parts]
    return at_least_float32(flats[0] if len(flats) == 1 else torch.cat(flats, 1))
