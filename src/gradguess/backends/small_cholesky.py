"""Cholesky factors of many small matrices on a CPU. Their number is the last dimension: each operation works on all.

LAPACK takes them one after the other, and an operation of PyTorch takes longer to start than to run on so few numbers.
NumPy's start faster, and an array shares its memory with a tensor. The factor of a matrix does not depend on its
neighbours, bit for bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def outer_products(V: Tensor) -> Tensor:
    """The lower triangles of `v vᵀ` for every row `v` of `V` (d, k): (k (k + 1) / 2, d)."""
    rows, columns, _ = _triangle(V.shape[1])
    return V.t().index_select(0, rows) * V.t().index_select(0, columns)


def cholesky(packed: Tensor) -> tuple[Tensor, Tensor]:
    """`semidefinite_cholesky` of matrices given by their lower triangles, in the order of `torch.tril_indices`.

    Accuracy: as there. Cost: `k³ / 3` operations per matrix, `5 k` calls of NumPy for all (row by row, left-looking).

    Args:
        packed: (k (k + 1) / 2, B).

    Returns:
        the upper factor `R` (k, k, B) with `C = RᵀR` (entries below its diagonal have no meaning), and the inverse of
        its diagonal (k, B), zero where a column was dropped.
    """
    k, batch = math.isqrt(2 * packed.shape[0]), packed.shape[1]
    if batch == 1:  # NumPy would sum a single matrix in another order
        two = cholesky(packed.expand(-1, 2))
        return two[0][..., :1], two[1][:, :1]
    factor = packed.index_select(0, _triangle(k)[-1]).view(k, k, batch)
    R: Any = factor.numpy()
    inverse: Any = np.empty_like(R[0])
    floor = 100 * k * torch.finfo(packed.dtype).eps * np.einsum("jjb->jb", R).max(0)
    with np.errstate(all="ignore"):
        for j in range(k):
            row, scale = R[j, j:], inverse[j]
            if j:
                row -= np.einsum("lb,lib->ib", R[:j, j], R[:j, j:])
            alive = row[0] > floor
            np.divide(alive, np.sqrt(row[0], out=scale), out=scale)
            scale[~alive] = 0  # also where the root was NaN
            row *= scale
    return factor, torch.from_numpy(inverse)


def solve(R: Tensor, inverse: Tensor, z: Tensor, transpose: bool = False) -> Tensor:
    """`R⁻¹ z` (or `R^{-T} z`) with the factors of `cholesky`; zero in the dropped columns.

    Args:
        R, inverse: (k, k, B) and (k, B).
        z: (k, B) or (k, n, B).
        transpose: solve with `Rᵀ`.
    """
    if z.dim() == 2:
        return solve(R, inverse, z[:, None], transpose)[:, 0]
    if z.shape[-1] == 1:
        return solve(R.expand(-1, -1, 2), inverse.expand(-1, 2), z.expand(-1, -1, 2), transpose)[..., :1]
    factor: Any = R.numpy()
    k, scale = z.shape[0], inverse.numpy()
    x = np.empty(z.shape, scale.dtype)
    np.multiply(z.numpy(), scale[:, None], out=x)
    for j in range(1, k) if transpose else reversed(range(k - 1)):
        done = slice(0, j) if transpose else slice(j + 1, k)
        column = factor[done, j] if transpose else factor[j, done]
        x[j] -= np.einsum("ib,inb->nb", column, x[done]) * scale[j]
    return torch.from_numpy(x)


@functools.cache
def _triangle(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of a lower triangle, and where in it each entry of the whole matrix is found."""
    rows, columns = torch.tril_indices(k, k)
    place = torch.empty(k, k, dtype=torch.long)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows))
    return rows, columns, place.flatten()
