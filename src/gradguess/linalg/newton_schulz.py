"""Odd polynomials of matrices, by products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def newton_schulz(A: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """`p` applied `steps` times, `p(A) = Σ_j a_j A (AᵀA)^j`: the same as `p` on the singular values.

    Works on the smaller of `AᵀA` and `AAᵀ`.

    Accuracy: rounding, amplified by the slope of `p`.
    Cost, degree 7: four products a step, two of them with the small side only; `8 n³` operations for `n × n`.
    Reference: Kovarik 1970; Jordan et al. 2024 (Muon).

    Args:
        A: (..., m, d), singular values in the range where `p` was fitted, [0, 1].
        coefficients: `a_0, a_1, ...`.
        steps: how often `p` is applied.

    Returns:
        of the shape of `A`.
    """
    m, d = A.shape[-2:]
    for _ in range(steps):
        P = polynomial(A @ A.mT if m < d else A.mT @ A, coefficients)
        A = P @ A if m < d else A @ P
    return A


def polynomial(G: Tensor, a: Sequence[float]) -> Tensor:
    """`Σ_j a_j G^j` by Horner's rule."""
    P = torch.zeros_like(G)
    P.diagonal(dim1=-2, dim2=-1).add_(a[-1])
    for i, c in enumerate(reversed(a[:-1])):
        P = G * a[-1] if i == 0 else P @ G
        P.diagonal(dim1=-2, dim2=-1).add_(c)
    return P
