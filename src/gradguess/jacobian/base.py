"""The Jacobian above one site, seen through its products; and its closed forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

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


class GatedLinear(Jacobian):
    """An elementwise function, then a linear layer: `W̃_b = W M_b` with `M_b = diag(gate_b)`, as in eq. (4).

    Args:
        weight: `W`, (m, d).
        gate: (batch, d); None where no function stands between the site and the layer.
        moment: the mean of gate² over a batch of which `gate` is a part, (d,).
    """

    def __init__(self, weight: Tensor, gate: Tensor | None, moment: Tensor | None = None) -> None:
        self.weight, self.gate, self.moment = weight, gate, moment
        self.m, self.d = weight.shape

    def vjp(self, eps: Tensor) -> Tensor:
        y = eps @ self.weight
        return y if self.gate is None else y.mul_(self.gate)

    def jvp(self, v: Tensor) -> Tensor:
        return (v if self.gate is None else v * self.gate) @ self.weight.t()

    def gram(self, X: Tensor) -> Tensor:
        if self.m < self.d:
            return super().gram(X)
        if self.gate is None:
            return X @ self.product
        return ((X * self.gate) @ self.product).mul_(self.gate)

    @cached_property
    def product(self) -> Tensor:
        """`WᵀW`, (d, d), shared by the batch: per sample only the gate changes."""
        return self.weight.t() @ self.weight

    def of_batch(self, k: int, noise: Noise) -> Tensor:
        """`W diag(mean gate²)^½`, (m, d)."""
        if self.gate is None:
            return self.weight
        moment = self.gate.square().mean(0) if self.moment is None else self.moment
        return self.weight * moment.sqrt()

    def matrix(self) -> Tensor:
        return self.weight[None] if self.gate is None else self.weight * self.gate[:, None, :]
