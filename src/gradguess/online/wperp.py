"""W⊥ through time: the influence on the few directions that the future sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import NonFiniteError, check_choice, check_count
from gradguess.online.bases import BASES
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition, carried, contracted, influences, zeros

MEMORY = 0.99  # of the second moment of the errors, per step


@dataclass(frozen=True)
class WPerp(Rule):
    """`P̃_t = (Vᵀ J_t V) P̃_{t-1} + Vᵀ F_t` with V (n × k) orthonormal: of `P_t` only `Vᵀ P_t` is kept.

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

    def start(self, transition: Transition) -> Kept:
        n, V, source = transition.width, transition.identity, transition.generator
        S = torch.zeros_like(V, dtype=torch.promote_types(V.dtype, torch.float32))
        if self.k < n:
            noise = torch.randn(n, self.k, dtype=S.dtype, generator=source, device=source.device)
            V = torch.linalg.qr(noise)[0].to(V)
        return Kept(zeros(transition, V.shape[1]), {"V": V, "S": S})

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return contracted(error.q @ kept.shared["V"], kept)

    def look(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        """Take note of the error, and search for a new basis from time to time."""
        V, S, search = kept.shared["V"], noted(kept, error), BASES[self.basis]
        if search is None or transition.count % self.refresh or V.shape[1] == V.shape[0]:
            return Kept(kept.rows, {"V": V, "S": S})
        J = transition.jacobian().to(S)
        if not bool(torch.isfinite(J).all()):
            raise NonFiniteError(
                f"The Jacobian of the state at step {transition.count} is NaN or infinite. Nothing was changed. Look "
                "for a root, a logarithm or a quotient at zero in the model."
            )
        seen = S if bool(S.any()) else transition.identity.to(S)  # no error yet: any may come
        new = search(J, seen, V.shape[1]).to(V)
        turn = new.T @ V
        return Kept({f"P/{name}": turn @ P for name, P in influences(kept).items()}, {"V": new, "S": S})

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        V = kept.shared["V"]
        CJ, CF = transition.vjps(V.T)
        return Kept(carried(CJ @ V, kept, CF), kept.shared)


def noted(kept: Kept, error: Error | None) -> Tensor:
    """`S`, the second moment of the errors, with this one."""
    S = kept.shared["S"]
    if error is None:
        return S
    q = error.q.to(S)
    return MEMORY * S + q.T @ q
