"""W⊥ through time: the influence on the few directions that the future sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError, check_count
from gradguess.online.bases import BASES
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition, carried, contracted, zeros

MEMORY = 0.99  # of the second moment of the errors, per step


@dataclass(frozen=True)
class WPerp(Rule):
    """`P̃_t = (Vᵀ J_t V) P̃_{t-1} + Vᵀ F_t` with V (n × k) orthonormal: of `P_t` only `Vᵀ P_t` is kept.

    The past gets the credit `(q V) P̃_{t-1}`; the newest step is exact. A new basis `V'` takes over `(V'ᵀ V) P̃`.
    With k = n this is RTRL, with k = 0 it would be one-step credit.

    Bias: what leaves the span of V. It is zero where V spans all errors `q` of the future (`VVᵀ` then changes nothing).
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
        if self.basis not in BASES:
            raise InputError(f"basis: expected one of {', '.join(BASES)}, found {self.basis!r}.")

    def start(self, transition: Transition) -> Kept:
        n, h = transition.width, transition.h
        k = min(self.k, n)
        S = torch.zeros(n, n, dtype=h.dtype, device=h.device)
        return Kept(zeros(transition, k), {"V": torch.eye(n, k, dtype=h.dtype, device=h.device), "S": S})

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return contracted(error.q @ kept.shared["V"], kept)

    def advance(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        V, S = kept.shared["V"], kept.shared["S"]
        if error is not None:
            S = MEMORY * S + error.q.T @ error.q
        if transition.count % self.refresh == 0 and V.shape[1] < V.shape[0]:
            kept, V = self._turned(kept, V, S, transition)
        CJ, CF = transition.vjps(V.T)
        return Kept(carried(CJ @ V, kept, CF), {"V": V, "S": S})

    def _turned(self, kept: Kept, V: Tensor, S: Tensor, transition: Transition) -> tuple[Kept, Tensor]:
        """The influence in a new basis."""
        new = BASES[self.basis](transition.jacobian(), S, V.shape[1])
        turn = new.T @ V
        return Kept({name: turn @ P for name, P in kept.rows.items()}), new
