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
from torch.utils.weak import WeakTensorKeyDictionary

from gradguess.backends import unrolled_cholesky

_known = WeakTensorKeyDictionary()  # V -> (its version, its outer products)


def outer_products(V: Tensor) -> Tensor:
    """The lower triangles of `v vᵀ` for every row `v` of `V` (d, k): (k (k + 1) / 2, d). Do not write to them.

    A basis serves for many steps: the result is kept as long as the tensor `V` lives, and computed anew after `V` was
    written to in place. PyTorch counts such writes, but not those through `V.data` or a NumPy array.
    """
    if V.is_inference():  # its writes are not counted
        return unrolled_cholesky.outer_products(V)
    version, outer = _known.get(V, (None, None))
    if outer is None or version != V._version:
        outer = unrolled_cholesky.outer_products(V)
        if not outer.requires_grad:
            _known[V] = V._version, outer
    return outer


def cholesky(packed: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
    """`semidefinite_cholesky` of matrices given by their lower triangles, in the order of `torch.tril_indices`.

    Accuracy: as there. Cost: `k³ / 3` operations per matrix, `5 k` calls of NumPy for all (row by row, left-looking).

    Args:
        packed: (k (k + 1) / 2, B).
        rtol: as in `semidefinite_cholesky`.

    Returns:
        the upper factor `R` (k, k, B) with `C = RᵀR` (entries below its diagonal have no meaning), and the inverse of
        its diagonal (k, B), zero where a column was dropped.
    """
    k, batch = math.isqrt(2 * packed.shape[0]), packed.shape[1]
    if batch == 1:  # NumPy would sum a single matrix in another order
        two = cholesky(packed.expand(-1, 2), rtol)
        return two[0][..., :1], two[1][:, :1]
    factor = torch.index_select(packed, 0, _places(k)).view(k, k, batch)
    R: Any = factor.numpy()
    inverse: Any = np.empty_like(R[0])
    rtol = 100 * k * torch.finfo(packed.dtype).eps if rtol is None else rtol
    floor = rtol * np.einsum("jjb->jb", R).max(0)
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
def _places(k: int) -> Tensor:
    """Where in the lower triangle each entry of the whole matrix is found."""
    rows, columns = torch.tril_indices(k, k)
    place = torch.empty(k, k, dtype=torch.long)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows))
    return place.flatten()
