"""Adam as a function, for what methods themselves learn: students, and heads of local losses."""

from __future__ import annotations

from torch import Tensor

BETAS, EPSILON = (0.9, 0.999), 1e-8


def adam(
    weights: Tensor, mean: Tensor, square: Tensor, count: Tensor, grad: Tensor, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Step number `count` (Kingma and Ba 2015): the new weights and moments. Nothing is written."""
    mean = mean.lerp(grad, 1 - BETAS[0])
    square = square.lerp(grad.square(), 1 - BETAS[1])
    root = (square / (1 - BETAS[1] ** count)).sqrt().add_(EPSILON)
    return weights - lr * (mean / (1 - BETAS[0] ** count)) / root, mean, square
