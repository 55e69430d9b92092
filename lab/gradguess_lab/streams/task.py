"""What a task on a stream is: an endless generator, and how its answers are judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Judged = Literal["squared", "classes", "bits"]


class Moment(NamedTuple):
    """What one step of all streams brings."""

    x: Tensor  # (streams, inputs)
    target: Tensor | None  # None: nothing is asked for
    ended: Tensor | None = None  # (streams,) of bool: streams whose episode starts anew with this step


@dataclass(frozen=True)
class Task:
    """A generator that never ends, and the sizes that a model needs.

    Attributes:
        moments: the endless generator.
        inputs, outputs: numbers that go in and come out at each step.
        judged: "squared" error; "classes": the part of wrong answers; "bits" per answer.
        chance: the error of a model that knows nothing of the past.
    """

    moments: Iterator[Moment]
    inputs: int
    outputs: int
    judged: Judged
    chance: float

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """What is minimised, one number per stream."""
        if self.judged == "squared":
            return ((output - target) ** 2).mean(1)
        return cross_entropy(output, target, reduction="none")

    def error(self, output: Tensor, target: Tensor) -> float:
        """What is reported."""
        if self.judged == "classes":
            return float((output.argmax(1) != target).float().mean())
        scale = 1 / torch.log(torch.tensor(2.0)) if self.judged == "bits" else 1.0
        return float(self.losses(output, target).mean() * scale)
