"""RFLO: traces that fade at a fixed rate, and random feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.online import traces
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


@dataclass(frozen=True)
class RFLO(Rule):
    """`T_t = decay · T_{t-1} + F_t`, and the error reaches the units through a fixed random matrix.

    The trace is that of a leaky unit with `decay = 1 - 1/τ` whose recurrent weights are taken as zero: choose `decay`
    as the cell leaks. As with `EProp`, `F_t` is that of a weight on its own cell. The newest step is exact, through the
    readout itself. All steps before it get the credit `decay · e B T_{t-1}` with `e = dL/d output` and
    `B ~ N(0, 1/n)`, drawn once. (The paper takes `B` for the newest step, too.)

    Bias: all credit through recurrent weights; `B` is not the readout. Memory and time: p for each stream.

    Reference: Murray 2019.

    Args:
        decay: of the traces at each step, at least 0 and below 1.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"decay: expected a number from 0 to below 1, found {self.decay!r}.")

    def start(self, transition: Transition) -> Kept:
        output, h, generator = transition.output, transition.h, transition.generator
        if not isinstance(output, Tensor) or output.shape[:1] != h.shape[:1]:
            raise InputError(
                "RFLO: expected an output that is one tensor with a row per stream: its feedback starts there."
            )
        size = output[0].numel(), transition.width
        B = torch.randn(size, generator=generator, device=generator.device).to(h) / transition.width**0.5
        kept = traces.start(transition, cut=True)
        return Kept(kept.rows, {**kept.shared, "B": B})

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        if error.e is None:  # the output depends on no parameter in this step
            return {}
        return traces.credit(kept, self.decay * (error.e @ kept.shared["B"]))

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        return traces.advance(kept, transition, float(self.decay), cut=True)
