"""e-prop: traces of what a unit does by itself."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition
from gradguess.online.units import Traces


@dataclass(frozen=True)
class EProp(Rule):
    """`T_t = D_t T_{t-1} + F_t` with `D_t` the part of the Jacobian that passes through no product with weights.

    That is the leak of a leaky or spiking unit, the gate of a `GRUCell`, the forget gate of an `LSTMCell`. Credit
    through recurrent weights is lost; in a plain `RNNCell` there is nothing else, and e-prop is one-step credit.
    The learning signal is the exact error at the state before the step (the paper takes that after the step, and also
    offers random feedback in its place).

    Bias: all credit through recurrent weights, from two steps back on. Memory and time: p for each stream.

    Reference: Bellec et al. 2020.
    """

    def start(self, transition: Transition) -> Kept:
        return Traces.find(transition, closed=True, cut=True).start(transition)

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return Traces.of(kept).credit(kept, error.q)

    def advance(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        return Traces.of(kept).advance(kept, transition, "cut")
