"""Cholesky factors of many small matrices, written out entry by entry: a compiler makes one loop of it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cholesky", "solve"]

Factor = list[list[Tensor]]  # the lower triangle, each entry for all matrices, (B,)


def cholesky(C: Tensor, rtol: float | None = None) -> tuple[Factor, list[Tensor]]:
    """`semidefinite_cholesky` of (B, k, k).

    Returns:
        the lower factor, and the inverse of its diagonal, zero where a column was dropped.
    """
    k = C.shape[-1]
    rtol = 100 * k * torch.finfo(C.dtype).eps if rtol is None else rtol
    floor = rtol * C.diagonal(dim1=-2, dim2=-1).amax(-1)
    L: Factor = [[] for _ in range(k)]
    inverse: list[Tensor] = []
    for j in range(k):
        for i in range(j, k):
            left = C[:, i, j]
            for m in range(j):
                left = left - L[i][m] * L[j][m]
            if i == j:
                inverse.append(torch.where(left > floor, left.clamp_min(torch.finfo(C.dtype).tiny).rsqrt(), 0.0))
            L[i].append(left * inverse[j])
    return L, inverse


def solve(L: Factor, inverse: list[Tensor], z: Tensor, transpose: bool) -> Tensor:
    """`L^{-T} z` (`transpose`) or `L⁻¹ z`, zero in the dropped columns: (..., B, k) -> the same."""
    k = len(inverse)
    x: list[Tensor] = [z[..., i] for i in range(k)]
    for i in reversed(range(k)) if transpose else range(k):
        done = range(i + 1, k) if transpose else range(i)
        for m in done:
            x[i] = x[i] - (L[m][i] if transpose else L[i][m]) * x[m]
        x[i] = x[i] * inverse[i]
    return torch.stack(x, -1)
