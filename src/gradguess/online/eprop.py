"""e-prop: traces of what a unit does by itself."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.online import traces
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


@dataclass(frozen=True)
class EProp(Rule):
    """`T_t = D_t T_{t-1} + F_t` with `D_t` the part of the Jacobian that passes through no product with weights.

    That is the leak of a leaky or spiking unit, the gate of a `GRUCell`, the forget gate of an `LSTMCell`. `F_t` is cut
    in the same way: in a stack a weight gets no trace on the cells above its own.
    The newest step is exact, and the learning signal for `T_{t-1}` is the exact error at the state before the step. So
    credit passes through recurrent weights once. (The paper takes the error after the step, so that it never does, and
    also offers random feedback in its place.) In a plain `RNNCell` `D` is zero, and this is `TBPTT(2)`.

    Bias: credit that passes through products with weights more than once, between cells of a stack included. Memory and
    time: p for each stream, 2 p for an `LSTMCell`. A fused cell hides its products: put it into `Recurrent`. A sum
    that is written as additions, term by term, hides one, too: use `sum`, `matmul` or `einsum`.

    Reference: Bellec et al. 2020.
    """

    def start(self, transition: Transition) -> Kept:
        return traces.start(transition, closed=True, cut=True)

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return traces.credit(kept, error.q)

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        return traces.advance(kept, transition, cut=True)
