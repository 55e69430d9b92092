"""W⊥ through time, completed: what leaves the basis is left to SnAp."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition, carried, contracted
from gradguess.online.snap import SnAp
from gradguess.online.units import Traces
from gradguess.online.wperp import WPerp


@dataclass(frozen=True)
class Completed(Rule):
    """`P_t ≈ V P̃_t + (I - VVᵀ) D_t`: W⊥'s influence within its basis, and SnAp's sparse D beyond it.

    `P̃_t = Vᵀ (J_t P_{t-1} + F_t)` with this P, so that what was outside of the basis and turns into it is not lost,
    neither in a step nor where the basis changes. With an exact D this is RTRL, whatever V is.

    Bias: what leaves the span of V and is not in SnAp's pattern. Memory: that of both rules. Time: that of both, and
    k p for each stream.

    Args:
        inner: the rule with the basis.
        rest: what stands for the influence beyond it.
    """

    inner: WPerp = field(default_factory=WPerp)
    rest: SnAp = field(default_factory=SnAp)

    def start(self, transition: Transition) -> Kept:
        return _joined(self.inner.start(transition), self.rest.start(transition))

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        V = kept.shared["V"]
        within = error.q @ V
        beyond = Traces.of(kept).credit(kept, error.q - within @ V.T)
        return {name: ours.flatten() + beyond[name] for name, ours in contracted(within, kept).items()}

    def look(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        seen, V = self.inner.look(_of_basis(kept), error, transition), kept.shared["V"]
        new = seen.shared["V"]
        if new is not V:
            gained = Traces.of(kept).through(kept, (new.T - new.T @ V @ V.T)[None])  # from beyond the old basis
            seen = Kept({f"P/{name}": seen.rows[f"P/{name}"] + more for name, more in gained.items()}, seen.shared)
        return _joined(kept, seen)

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        V = kept.shared["V"]
        CJ, CF = transition.vjps(V.T)
        within = CJ @ V
        gained = Traces.of(kept).through(kept, CJ - within @ V.T)
        rows = carried(within, kept, {name: F + gained.pop(name) for name, F in CF.items()})
        return Kept({**self.rest.advance(kept, transition).rows, **rows}, kept.shared)


def _joined(one: Kept, other: Kept) -> Kept:
    """Both, the names of the other before those of the one. Those of the two rules differ."""
    return Kept({**one.rows, **other.rows}, {**one.shared, **other.shared})


def _of_basis(kept: Kept) -> Kept:
    return Kept({name: value for name, value in kept.rows.items() if name.startswith("P/")}, kept.shared)
