"""Real-time recurrent learning: the whole influence matrix."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.online import traces
from gradguess.online.rule import Error, Rule, Tensors, Transition, advanced, credit_through, zero_influence


@dataclass(frozen=True)
class RTRL(Rule):
    """Exact: `P_t = J_t P_{t-1} + F_t`, all n × p numbers of it, for each stream.

    Bias: none while the weights stay. When they change, what is kept belongs to the weights of the past steps.
    Memory: n p for each stream. Time: n² p for each stream and step.
    A model that says `elementwise = True` (no unit of the state sees another, as in `LRU`) needs far less: the few
    numbers by which each parameter moves its own unit. Memory and time: about 2 p. It is exact all the same.

    Reference: Williams and Zipser 1989; element-wise: Mozer 1989, Zucchet et al. 2023.
    """

    def start(self, transition: Transition) -> Tensors:
        if getattr(transition.model, "elementwise", False):
            return traces.start(transition)
        return zero_influence(transition, transition.width)

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return traces.credit(memory, error.q) if "shared/colours" in memory else credit_through(error.q, memory)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        if "shared/colours" in memory:
            return traces.advance(memory, transition)
        J, F = transition.vjps(transition.identity)
        return advanced(J, memory, F)
