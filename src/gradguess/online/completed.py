"""W⊥ through time, completed: SnAp carries what leaves the basis."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradguess.errors import InputError
from gradguess.online import traces
from gradguess.online.rule import Error, Rule, Tensors, Transition, advanced, credit_through
from gradguess.online.trace_rules import SnAp
from gradguess.online.wperp import WPerp


@dataclass(frozen=True)
class Completed(Rule):
    """`P_t ≈ V P̃_t + (I - VVᵀ) D_t`: W⊥'s influence within its basis, and SnAp's sparse D beyond it.

    `P̃_t = Vᵀ (J_t P_{t-1} + F_t)` with this P, so that what was outside of the basis and turns into it is not lost,
    neither in a step nor where the basis changes. With an exact D this is RTRL, whatever V is.

    Bias: what leaves the span of V, where D is wrong: outside of SnAp's pattern, and within it for credit that comes
    back through other units. D grows without bound where a unit by itself does, even if all of them together do not.
    Memory: that of both rules. Time: that of both, and k p for each stream.

    Reference: this library.

    Args:
        inner: the rule with the basis.
        rest: what stands for the influence beyond it.
    """

    inner: WPerp = field(default_factory=WPerp)
    rest: SnAp = field(default_factory=SnAp)

    def __post_init__(self) -> None:
        if not (isinstance(self.inner, WPerp) and isinstance(self.rest, SnAp)):
            found = f"{type(self.inner).__name__} and {type(self.rest).__name__}"
            raise InputError(f"Completed: expected a WPerp and a SnAp, as in Completed(WPerp(k=16)), found {found}.")

    def start(self, transition: Transition) -> Tensors:
        return self.inner.start(transition) | self.rest.start(transition)

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        within = error.q @ V
        beyond = traces.credit(memory, error.q - within @ V.T)
        return {name: inside + beyond[name] for name, inside in credit_through(within, memory).items()}

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        V, found = memory["shared/V"], self.inner.look(memory, error, transition)
        new = found["shared/V"]
        if new is not V:
            gained = traces.through(memory, (new.T - new.T @ V @ V.T)[None])  # from beyond the old basis
            found |= {f"P/{name}": found[f"P/{name}"] + more for name, more in gained.items()}
        return found

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        CJ, CF = transition.vjps(V.T)
        within = CJ @ V
        gained = traces.through(memory, CJ - within @ V.T)
        F = {name: more.add_(CF.pop(name)) for name, more in gained.items()}
        return memory | self.rest.advance(memory, transition) | advanced(within, memory, F)
