"""RFLO: traces that fade at a fixed rate, and random feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition
from gradguess.online.units import Traces


@dataclass(frozen=True)
class RFLO(Rule):
    """`T_t = decay · T_{t-1} + F_t`, and the error reaches the units through a fixed random matrix.

    The trace is that of a leaky unit with `decay = 1 - 1/τ` whose recurrent weights are taken as zero. The past gets
    the credit `e B T` with `e = dL/d output` and `B ~ N(0, 1/n)`, drawn once.

    Bias: all credit through recurrent weights; `B` is not the readout. Memory and time: p for each stream.

    Reference: Murray 2019.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"decay: expected a number from 0 to below 1, found {self.decay!r}.")

    def start(self, transition: Transition) -> Kept:
        return Traces.find(transition, cut=True).start(transition)

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        if error.e is None:
            raise InputError("RFLO: expected an output that is one tensor, found a tree: its feedback starts there.")
        B = _feedback(error.e, transition.width)
        return Traces.of(kept).credit(kept, self.decay * (error.e @ B))

    def advance(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        return Traces.of(kept).advance(kept, transition, float(self.decay))


def _feedback(e: Tensor, width: int) -> Tensor:
    """(outputs, n), the same at every step."""
    generator = torch.Generator().manual_seed(e.shape[1])
    return (torch.randn(e.shape[1], width, generator=generator) / width**0.5).to(e)
