"""SnAp: the influence in a sparse pattern."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.errors import check_count
from gradguess.online import traces
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


@dataclass(frozen=True)
class SnAp(Rule):
    """`P_t = M ∘ (J_t P_{t-1} + F_t)`: M holds what a row of a parameter can reach within `order` steps.

    With order 1 a row of an `RNNCell` or a `GRUCell` keeps its influence on its own unit; credit that passes through
    another unit and comes back is lost. With order 2 and a dense recurrence M holds everything: that is RTRL.
    The pattern is read from the model itself, at the first step. In a stack, and for an embedding before the cell, a
    row reaches all units above it within one step, and keeps as much.
    The newest step is exact, and `q P_{t-1}` takes the hop from it to the one before without a mask. (The
    paper masks that hop, too.)

    Bias: all influence outside of M, from two steps back on. Memory: p for each stream (`RNNCell`), 2 p (`LSTMCell`).
    Time: p, and n vjps of the cell for the diagonal of J.

    Reference: Menick et al. 2021.

    Args:
        order: within how many steps a row must reach what M holds.
    """

    order: int = 1

    def __post_init__(self) -> None:
        check_count("order", self.order)

    def start(self, transition: Transition) -> Kept:
        return traces.start(transition, self.order)

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return traces.credit(kept, error.q)

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        return traces.advance(kept, transition, transition.jacobian())
