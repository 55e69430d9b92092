"""The Jacobian above one site, seen through its products."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gradguess.linalg import followed_bases
from gradguess.noise import Noise


class Jacobian(ABC):
    """One matrix `W̃` per sample, `m × d`.

    Vectors carry the batch in their second to last dimension: (..., batch, m) above, (..., batch, d) at the site.
    """

    m: int
    d: int

    @abstractmethod
    def vjp(self, eps: Tensor) -> Tensor:
        """`W̃ᵀ ε`: (..., batch, m) -> (..., batch, d)."""

    @abstractmethod
    def jvp(self, v: Tensor) -> Tensor:
        """`W̃ v`: (..., batch, d) -> (..., batch, m)."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Every sample's `W̃`, dense: (batch, m, d), or (1, m, d) for one that all share. For references."""

    def gram(self, X: Tensor) -> Tensor:
        """`W̃ᵀ W̃ X` for every sample: (p, batch, d) -> (p, batch, d)."""
        return self.vjp(self.jvp(X))

    def gram_columns(self, X: Tensor) -> Tensor:
        """The same for columns: (batch, d, p) -> (batch, d, p)."""
        return self.gram(X.permute(2, 0, 1)).permute(1, 2, 0)

    @abstractmethod
    def of_batch(self, k: int, noise: Noise) -> Tensor:
        """One matrix for the batch as a whole, (rows, d), that has its top-k right singular vectors."""

    def shared_basis(self, k: int, noise: Noise) -> Tensor:
        """An orthonormal basis of what these vectors span, (d, k)."""
        return followed_bases([self.of_batch(k, noise)], [k], [None])[0]


class Dense(Jacobian):
    """One matrix per sample, written out: (batch, m, d)."""

    def __init__(self, W: Tensor) -> None:
        self.W = W
        _, self.m, self.d = W.shape

    def vjp(self, eps: Tensor) -> Tensor:
        return (self.W.mT @ eps[..., None])[..., 0]

    def jvp(self, v: Tensor) -> Tensor:
        return (self.W @ v[..., None])[..., 0]

    def matrix(self) -> Tensor:
        return self.W

    def of_batch(self, k: int, noise: Noise) -> Tensor:
        return self.W.flatten(0, 1)
