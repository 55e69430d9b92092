"""The bases: functions that choose k directions of the state, named in `BASES`.

Each takes the Jacobians of a step (batch, n, n), the second moment `S` of the errors `q` at the state (n, n), and k.
It returns orthonormal columns (n, k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gradguess.linalg import sure_eigh

LAGS = 40  # of the Gramian: its sum diverges where the spectral radius reaches one
FAR = 128  # lags, where each term is scaled

Basis = Callable[[Tensor, Tensor, int], Tensor]


def wperp(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the recurrence passes on: top right singular vectors of the mean Jacobian."""
    mean = J.mean(0)
    return _top(mean.T @ mean, k)


def observable(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses see: top eigenvectors of the observability Gramian `Σ_j (J̄ᵀ)^j S J̄^j`.

    Near errors outweigh far ones, as each step back shrinks them.
    """
    mean, S = J.mean(0), _scaled(S)
    Q, weight = S, torch.ones_like(S[0, 0])
    for _ in range(LAGS):
        Q = weight * S + mean.T @ Q @ mean
        size = Q.trace().clamp_min(1)  # only directions count: nothing may overflow
        Q, weight = Q / size, weight / size
    return _top(Q, k)


def lagged(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses see, whatever the lag: the Gramian's terms, each of trace one, weighing `1 / lag`.

    An error that looks far back is weak, not unimportant: it may be the only one that can be explained. With these
    weights the lags from 1 to 2, from 2 to 4, from 4 to 8 and so on count alike.
    """
    weighed = (term / lag for lag, term in enumerate(_terms(J, S, FAR), 1))
    return _top(sum(weighed, start=torch.zeros_like(S)), k)


def krylov(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses of the next k steps see: the Gramian's first k terms, each of trace one.

    With one output each term is one direction, and the k of them span all that these losses see.
    """
    return _top(sum(_terms(J, S, k), start=torch.zeros_like(S)), k)


BASES: Mapping[str, Basis | None] = {
    "wperp": wperp,
    "observable": observable,
    "lagged": lagged,
    "krylov": krylov,
    "random": None,  # the directions of the start stay: the control
}


def _terms(J: Tensor, S: Tensor, count: int) -> Iterator[Tensor]:
    """`(J̄ᵀ)^j S J̄^j` for j = 0, 1, ..., each divided by its trace."""
    mean, term = J.mean(0), _scaled(S)
    for _ in range(count):
        yield term
        term = _scaled(mean.T @ term @ mean)


def _top(Q: Tensor, k: int) -> Tensor:
    """The top-k eigenvectors of a symmetric matrix."""
    return sure_eigh(_scaled((Q + Q.T) / 2))[1].flip(1)[:, :k].contiguous()


def _scaled(Q: Tensor) -> Tensor:
    """The matrix divided by its trace; zero stays zero."""
    trace = Q.trace()
    return Q / torch.where(trace > 0, trace, 1)
