"""Cholesky factors of many small matrices, written out entry by entry: a compiler makes one loop of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Factor = list[list[Tensor]]  # the lower triangle, each entry for all matrices, (B,)


def outer_products(V: Tensor) -> Tensor:
    """The lower triangles of `v vᵀ` for every row `v` of `V` (d, k), row by row: (k (k + 1) / 2, d)."""
    columns = V.t()
    i, j = torch.tril_indices(len(columns), len(columns), device=V.device)
    return columns[i] * columns[j]


def cholesky(packed: Sequence[Tensor]) -> tuple[Factor, list[Tensor]]:
    """`semidefinite_cholesky` of B matrices, given by their lower triangles: row by row, each entry for all, (B,).

    Returns:
        the lower factor, and the inverse of its diagonal, zero where a column was dropped.
    """
    k = math.isqrt(2 * len(packed))
    precision = torch.finfo(packed[0].dtype)
    C = [packed[i * (i + 1) // 2 :][: i + 1] for i in range(k)]
    floor = 100 * k * precision.eps * functools.reduce(torch.maximum, [C[i][i] for i in range(k)])
    L: Factor = [[] for _ in range(k)]
    inverse: list[Tensor] = []
    for j in range(k):
        for i in range(j, k):
            left = C[i][j]
            for m in range(j):
                left = left - L[i][m] * L[j][m]
            if i == j:
                inverse.append(torch.where(left > floor, left.clamp_min(precision.tiny).rsqrt(), 0.0))
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
