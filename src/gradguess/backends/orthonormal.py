"""Orthonormal bases of many small sets of vectors; dependent vectors become zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess.backends import kernels
from gradguess.backends.cholesky import semidefinite_cholesky
from gradguess.backends.tracing import tracing


def positive(x: Tensor) -> Tensor:
    """`x`, with ones where it is not positive: a divisor."""
    return torch.where(x > 0, x, 1.0)


def orthonormal_columns(A: Tensor) -> Tensor:
    """Orthonormal bases of the column spans, in Gram–Schmidt order; zero columns where a column is dependent.

    `QᵀA` is upper triangular with a positive diagonal, so that Gaussian columns give Haar-distributed ones. A
    column is dropped when what is left of it after the columns before it is below `10 (k + √d) eps` of the
    largest column; the columns after it are not orthogonalised against rounding, as plain QR would do.

    Accuracy: `|QᵀQ - I| ~ k eps`, and the span that of Gram–Schmidt without the dropped columns.
    Cost: `4 d k²` operations by LAPACK on the CPU, where only matrices with a dropped column go on to Cholesky QR;
    three passes of Cholesky QR, `12 d k²`, elsewhere, without waiting for the device.
    Reference: Yamamoto et al. 2015, *Roundoff error analysis of the CholeskyQR2 algorithm*.

    Args:
        A: (B, d, k) or (d, k); fastest where it is the transpose of a contiguous (B, k, d).

    Returns:
        Q, of the shape of `A`, the transpose of a contiguous tensor.
    """
    if A.ndim == 2:
        return orthonormal_columns(A[None])[0]
    rows, _ = orthonormal_rows(A.mT.contiguous())
    return rows.mT


def orthonormal_rows(R: Tensor, rough: bool = False) -> tuple[Tensor, Tensor]:
    """`orthonormal_columns` of vectors that lie as rows.

    Args:
        R: (B, k, d).
        rough: one pass of Cholesky QR is enough, since the result will be multiplied and come again.

    Returns:
        the orthonormal rows (B, k, d), and the norm of what was left of each row after the rows before it, as a
        share of the largest row (B, k, 1).
    """
    k, d = R.shape[-2:]
    rtol = 10 * (k + d**0.5) * torch.finfo(R.dtype).eps
    if tracing() or R.device.type != "cpu" or k > d:
        return cholesky_qr_rows(R, rtol, 1 if rough else kernels.PASSES)
    Q, T = torch.linalg.qr(R.mT)
    diagonal = T.diagonal(dim1=-2, dim2=-1)[..., None]
    left = diagonal.abs() / positive(torch.linalg.vector_norm(T, dim=-2).amax(-1)[:, None, None])
    rows = Q.mT * diagonal.sign()
    complete = (left > rtol).all(-2)[:, 0]
    if not complete.all():
        (rest,) = torch.where(~complete)
        rows[rest], left[rest] = cholesky_qr_rows(R[rest], rtol)
    return rows, left


def cholesky_qr_rows(R: Tensor, rtol: float, passes: int = kernels.PASSES) -> tuple[Tensor, Tensor]:
    """`orthonormal_rows` by Cholesky QR of the unit-norm rows, `passes` times; on any device.

    A row that one pass finds dependent keeps its residual, is scaled to norm one and tried again in the next. The third
    pass drops it: after fewer of them its residual is in its place.
    """
    largest = torch.linalg.vector_norm(R, torch.inf, dim=(-2, -1), keepdim=True)
    R = R / largest.clamp_min(torch.finfo(R.dtype).tiny)  # no overflow in the squares
    if kernels.usable(R, R.shape[-2]):
        return kernels.orthonormal_rows(R, rtol, passes)
    left = torch.linalg.vector_norm(R, dim=-1, keepdim=True)
    left = left / positive(left.amax(-2, keepdim=True))
    eye = torch.eye(R.shape[-2], dtype=R.dtype, device=R.device).expand(len(R), -1, -1)
    alive = left > rtol
    for _ in range(passes):
        R = R * (alive / positive(torch.linalg.vector_norm(R, dim=-1, keepdim=True)))
        L, kept = semidefinite_cholesky(R @ R.mT)
        R = torch.linalg.solve_triangular(L, eye, upper=False) @ R
        size = torch.linalg.vector_norm(R, dim=-1, keepdim=True)
        left = left * size * L.diagonal(dim1=-2, dim2=-1)[..., None]  # with a one on the diagonal where it was dropped
        alive = alive & (left > rtol)
    return R * (alive & kept[..., None] if passes == kernels.PASSES else alive), left
