"""W⊥ through time: the influence on the few directions that the future sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradguess.errors import NonFiniteError, check_choice, check_count
from gradguess.online.bases import BASES
from gradguess.online.rule import (
    Error,
    Rule,
    Tensors,
    Transition,
    advanced,
    credit_through,
    influence,
    zero_influence,
)

DECAY = 0.99  # of the second moment of the errors, per step


@dataclass(frozen=True)
class WPerp(Rule):
    """`P̃_t = (Vᵀ J_t V) P̃_{t-1} + Vᵀ F_t` with V (n × k) orthonormal: of `P_t` only `Vᵀ P_t` is memory.

    The past gets the credit `(q V) P̃_{t-1}`; the newest step is exact. A new basis `V'` takes over `(V'ᵀ V) P̃`.
    With k = n this is RTRL, with k = 0 it would be one-step credit. V starts at random.

    Bias: what leaves the span of V. It is zero where V spans the errors `dL_s/dh_t` of all later losses at all states
    that they go back to (`VVᵀ` then changes nothing).
    Memory: k p for each stream, and n (k + n) once. Time: k² p for each stream and step, and k vjps of the cell; every
    `refresh` steps n vjps and an eigenvalue problem of size n.

    Reference: the paper's W⊥, along time; the Gramian and its truncation: Moore 1981.

    Args:
        k: number of directions; n at most.
        basis: "lagged" what the losses see, near and far; "krylov" what those of the next k steps see; "observable"
            what they see, weighed by its strength; "wperp" what the recurrence passes on; "random" a control.
        refresh: steps between two searches for the basis.
    """

    k: int = 16
    basis: str = "lagged"
    refresh: int = 50

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_count("refresh", self.refresh)
        check_choice("basis", self.basis, tuple(BASES))

    def start(self, transition: Transition) -> Tensors:
        n, V, source = transition.width, transition.identity, transition.generator
        S = torch.zeros_like(V, dtype=torch.promote_types(V.dtype, torch.float32))
        if self.k < n:
            noise = torch.randn(n, self.k, dtype=S.dtype, generator=source, device=source.device)
            V = torch.linalg.qr(noise)[0].to(V)
        return {**zero_influence(transition, V.shape[1]), "shared/V": V, "shared/S": S}

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return credit_through(error.q @ memory["shared/V"], memory)

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        """The memory with this error in `S`, and from time to time in a new basis."""
        memory = self.with_error(memory, error)
        V, S, search = memory["shared/V"], memory["shared/S"], BASES[self.basis]
        if search is None or transition.count % self.refresh or V.shape[1] == V.shape[0]:
            return memory
        J = transition.jacobian().to(S)
        if not bool(torch.isfinite(J).all()):
            raise NonFiniteError(
                f"The Jacobian of the state at step {transition.count} is NaN or infinite. Nothing was changed. Look "
                "for a root, a logarithm or a quotient at zero in the model."
            )
        seen = S if bool(S.any()) else transition.identity.to(S)  # no error yet: any may come
        new = search(J, seen, V.shape[1]).to(V)
        turn = new.T @ V
        return memory | {name: turn @ P for name, P in influence(memory).items()} | {"shared/V": new}

    def with_error(self, memory: Tensors, error: Error | None) -> Tensors:
        """The memory with this error in `S`, the second moment of the errors."""
        if error is None:
            return memory
        S = memory["shared/S"]
        q = error.q.to(S)
        return memory | {"shared/S": DECAY * S + q.T @ q}

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        CJ, CF = transition.vjps(V.T)
        return memory | advanced(CJ @ V, memory, CF)
