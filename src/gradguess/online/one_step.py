"""Credit for the newest step alone."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


@dataclass(frozen=True)
class OneStep(Rule):
    """`P = 0`: the state before the step is taken as an input.

    Bias: all credit beyond the step itself. Memory: none. Time: that of the step. The same as `TBPTT(1)`.

    Reference: Elman 1990.
    """

    def start(self, transition: Transition) -> Kept:
        return Kept()

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return {}

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        return kept
