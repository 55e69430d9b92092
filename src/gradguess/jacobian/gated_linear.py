"""The Jacobian of an elementwise function and a linear layer after it, in closed form."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from gradguess.jacobian.base import Jacobian
from gradguess.noise import Noise


class GatedLinear(Jacobian):
    """`W̃_b = W diag(gate_b)`.

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
        if self.gate is None:
            return self.weight[None]
        return self.weight * self.gate[:, None, :]
