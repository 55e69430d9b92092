"""Factors of positive semi-definite matrices that may be singular, and solves with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from gradguess.backends import kernels, small_cholesky, unrolled_cholesky
from gradguess.backends.tracing import tracing

SMALL = 16  # up to this k, on a CPU, matrices are factored side by side (`small_cholesky`) and not by LAPACK


class GramRoot:
    """`C_b^{-½}` of every sample `b`, with `C_b = Vᵀ D_b² V` for one basis `V` and each sample's gate `D_b`.

    The columns of `D_b V C_b^{-½}` are orthonormal. A column of `D_b V` that depends on the columns before it is
    dropped: there the results are zero. `C_b^{-½}` is the transposed inverse of a Cholesky factor of `C_b`.

    Accuracy: that of `semidefinite_cholesky`. What is computed for a sample does not depend on the other samples of the
    batch, but for rounding in the product of all gates with the outer products of the rows of `V`.
    Cost: `batch d k²` operations for all `C_b` (half of that up to k = 16 on a CPU), `k³/3` to factor one of them when
    it is first needed, `k²` for each solve.

    Args:
        V: (d, k).
        squared_gate: (batch, d), the diagonals of `D_b²`.
    """

    def __init__(self, V: Tensor, squared_gate: Tensor) -> None:
        self.V, self.squared_gate = V, squared_gate
        self._unrolled = tracing() and V.shape[1] <= SMALL
        self._small = not tracing() and V.shape[1] <= SMALL and V.device.type == "cpu"

    def solve(self, z: Tensor, transposed: bool = False) -> Tensor:
        """`C_b^{-½} z_b`, or `transposed` `(C_b^{-½})ᵀ z_b`: (..., batch, k) -> the same."""
        if z.dim() > 3:
            return self.solve(z.flatten(0, -3), transposed).reshape(z.shape)
        if self._unrolled:
            return unrolled_cholesky.solve(*self._written_out, z, transpose=not transposed)
        if self._small:
            return _batch_last(lambda x: small_cholesky.solve(*self._packed_factors, x, transposed), z)
        if not transposed and kernels.usable(z, z.shape[-1]):
            return kernels.solve(self._matrices, z)
        L, alive = self._factors
        return triangular_apply(L, z, False) * alive if transposed else triangular_apply(L, z * alive)

    @cached_property
    def _written_out(self) -> tuple[unrolled_cholesky.Factor, list[Tensor]]:
        if self.V.device.type == "cpu":
            packed = unrolled_cholesky.outer_products(self.V) @ self.squared_gate.t()
            return unrolled_cholesky.cholesky(list(packed))
        k = self.V.shape[1]  # a GPU takes longer for the triangles than for all of the matrices
        return unrolled_cholesky.cholesky([self._matrices[:, i, j] for i in range(k) for j in range(i + 1)])

    @cached_property
    def _packed_factors(self) -> tuple[Tensor, Tensor]:
        return small_cholesky.cholesky(small_cholesky.outer_products(self.V) @ self.squared_gate.t())

    @cached_property
    def _matrices(self) -> Tensor:
        """Every `C_b`, (batch, k, k). A replayed CUDA graph must compute the outer products anew: they are not kept."""
        d, k = self.V.shape
        outer = (self.V[:, :, None] * self.V[:, None, :]).reshape(d, k * k)
        return (self.squared_gate @ outer).reshape(-1, k, k)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        return semidefinite_cholesky(self._matrices)


def _batch_last(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`function` on (batch, k) or (n, batch, k), which gets and gives k first and the batch last."""
    if z.dim() == 2:
        return function(z.t()).t()
    return function(z.permute(2, 0, 1)).permute(1, 2, 0)


def semidefinite_cholesky(C: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factor of positive semi-definite matrices that may be singular, or zero.

    A column whose remaining pivot is at most `100 k eps` times the largest diagonal entry of its matrix depends on
    the columns before it: there `L` gets a one on the diagonal and zeros below, and `alive` is False. For
    `C = YᵀY` the columns of `Y L^{-T}` are then orthonormal where alive, and the negligible residual
    elsewhere; the caller zeroes it with the mask: `Y L^{-T} (alive z)` has an exact projector as covariance.
    Where every column is alive, `L Lᵀ = C`.

    Accuracy: `QᵀQ` is off by about `eps` over the smallest relative pivot kept, so by 1e-2 at the very worst
    and 1e-6 (float32) for columns of ordinary conditioning.
    Cost: `k³/3` operations per matrix. On the CPU LAPACK factors the batch, and only matrices with a dropped
    pivot go through the loop. On a GPU the loop runs `k` times over the batch, without waiting for the device.

    Args:
        C: (B, k, k), symmetric.

    Returns:
        `L` (B, k, k) and `alive` (B, k), bool.
    """
    k = C.shape[-1]
    floor = 100 * k * torch.finfo(C.dtype).eps * C.diagonal(dim1=-2, dim2=-1).amax(-1)  # (B,)
    if tracing() or C.device.type != "cpu":
        return dropping_cholesky(C, floor)
    L, info = torch.linalg.cholesky_ex(C)
    alive = L.diagonal(dim1=-2, dim2=-1).square() > floor[:, None]
    complete = alive.all(-1) & (info == 0)
    if complete.all():
        return L, alive
    (rest,) = torch.where(~complete)
    L[rest], alive[rest] = dropping_cholesky(C[rest], floor[rest])
    return L, alive


def dropping_cholesky(C: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """`semidefinite_cholesky` by a loop over the columns, on any device: drops pivots not above `floor` (B,).

    Right-looking, with the batch in the last dimension.
    """
    rest = C.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)  # (k, k, B), becomes L
    for j in range(C.shape[-1]):
        pivot = rest[j, j]
        rest[j:, j].mul_(torch.where(pivot > floor, pivot.rsqrt(), 0.0))
        column = rest[j + 1 :, j]
        rest[j + 1 :, j + 1 :].addcmul_(column[:, None], column[None], value=-1)
    L = rest.permute(2, 0, 1).tril()
    diagonal = L.diagonal(dim1=-2, dim2=-1)
    alive = diagonal > 0
    diagonal.add_(~alive)
    return L, alive


def triangular_apply(L: Tensor, z: Tensor, transpose: bool = True) -> Tensor:
    """`L^{-T} z` (or `L^{-1} z`) for every matrix of a batch and every right-hand side.

    Cost: `k²` operations per right-hand side.

    Args:
        L: (B, k, k), lower triangular, as `semidefinite_cholesky` returns it.
        z: (B, k) or (n, B, k).
        transpose: solve with `Lᵀ` instead of `L`.

    Returns:
        the solutions, of the shape of `z`.
    """
    columns = z[..., None] if z.ndim == 2 else z.permute(1, 2, 0)  # (B, k, 1 or n)
    matrix = L.mT if transpose else L
    x: Tensor = torch.linalg.solve_triangular(matrix, columns, upper=transpose)
    return x[..., 0] if z.ndim == 2 else x.permute(2, 0, 1)
