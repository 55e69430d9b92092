"""Factors of many small matrices: the root that makes a gated basis orthonormal, orthonormal bases, eigenvectors."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-13  # of the largest diagonal entry: a hundred times what rounding leaves of a pivot that is zero
SEEN = 1e-7  # of a vector: what is smaller is lost in a Gram matrix of float64


def positive(x: Tensor) -> Tensor:
    """`x`, with ones where it is not positive: a divisor."""
    return torch.where(x > 0, x, 1.0)


def gram_root(V: Tensor, gate: Tensor, binary: bool = False) -> Tensor:
    """Lower factors `L_b` of `C_b = Vᵀ D_b² V`, for a basis `V` and each sample's gate `D_b`: `C_b^{-½}` is `L_b^{-T}`.

    The columns of `D_b V L_b^{-T}` are orthonormal, in Gram–Schmidt order. A column of `D_b V` that depends on those
    before it becomes a column of zeros, since `C_b` gets a ridge of 1e-13 of its largest diagonal entry. It does so but
    for rounding, multiplied by 3e6: in float64, where `L` is, that is nothing, and products with `V` must be so too.

    Accuracy: the covariance differs from a projector by 1e-13 over the squares of the relative singular values of
    `D_b V`. What is computed for a sample does not depend on the other samples, but for rounding in the product of all
    gates with the outer products of the rows of `V`.
    Cost: `batch d k²` operations for all `C_b`, `k³/3` to factor one of them. Does not wait for the device.

    Args:
        V: (d, k).
        gate: (batch, d), the diagonals of `D_b`.
        binary: the gate is its own square.

    Returns:
        (batch, k, k), float64.
    """
    (d, k), V = V.shape, V.double()
    squared = gate.double() if binary else gate.double().square()
    C = (squared @ (V[:, :, None] * V[:, None, :]).reshape(d, k * k)).view(-1, k, k)
    del squared  # (batch, d) numbers, no longer there when the factors are made
    diagonal = C.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * positive(diagonal.amax(-1, keepdim=True))
    return torch.linalg.cholesky_ex(C)[0]


def solve_columns(L: Tensor, z: Tensor, transposed: bool = False) -> Tensor:
    """`L_b⁻¹ z_b`, or `transposed` `L_b^{-T} z_b`: (batch, k, k), (..., batch, k) -> like `z`."""
    columns = z.reshape(-1, *z.shape[-2:]).permute(1, 2, 0)  # (batch, k, draws)
    u = torch.linalg.solve_triangular(L.mT if transposed else L, columns, upper=transposed)
    return u.permute(2, 0, 1).reshape(z.shape)


def orthonormal_columns(A: Tensor) -> Tensor:
    """Orthonormal bases of the column spans, in Gram–Schmidt order; zero columns where a column is dependent.

    `QᵀA` is upper triangular with a positive diagonal, so that Gaussian columns give Haar-distributed ones. A
    column is dropped when what is left of it after the columns before it is below `10 (k + √d) eps` of the
    largest column, or 1e-7 of itself; the columns after it are not orthogonalised against rounding, as plain QR would
    do.

    Accuracy: `|QᵀQ - I| ~ k eps`, and the span that of Gram–Schmidt without the dropped columns.
    Cost: two passes of Cholesky QR in float64, `8 d k²` operations. Does not wait for the device.
    Reference: Yamamoto et al. 2015, *Roundoff error analysis of the CholeskyQR2 algorithm*.

    Args:
        A: (..., d, k).

    Returns:
        Q, of the shape of `A`, the transpose of a contiguous tensor.
    """
    return orthonormal_rows(A.mT)[0].mT


def orthonormal_rows(R: Tensor) -> tuple[Tensor, Tensor]:
    """`orthonormal_columns` of vectors that lie as rows, (..., k, d).

    Returns:
        the orthonormal rows (..., k, d), and the norm of what was left of each row after the rows before it, as a
        share of the largest row (..., k, 1).
    """
    k, d = R.shape[-2:]
    rows = R.reshape(-1, k, d)
    rows = rows.double() / positive(rows.abs().amax((-2, -1), keepdim=True)).double()  # no overflow in the squares
    size = torch.linalg.vector_norm(rows, dim=-1)
    share = size / positive(size.amax(-1, keepdim=True))
    rows = rows / positive(size)[:, :, None]
    least = (10 * (k + d**0.5) * torch.finfo(R.dtype).eps / positive(share)).clamp_min(SEEN)
    L = _factor(rows, least.square())
    # Where several rows share a direction that the ridge half hides, the squares of these sum to one: one row is kept.
    kept = torch.linalg.vector_norm(torch.linalg.solve_triangular(L, rows, upper=False), dim=-1) > 0.75
    left = share * L.diagonal(dim1=-2, dim2=-1)
    rows = rows * kept[:, :, None]  # from the start, without the others
    for _ in range(2):
        rows = torch.linalg.solve_triangular(_factor(rows, ~kept), rows, upper=False)
    return rows.to(R.dtype).reshape(R.shape), left.to(R.dtype).reshape(*R.shape[:-1], 1)


def _factor(rows: Tensor, more: Tensor) -> Tensor:
    """The Cholesky factor of the Gram matrix of `rows`, with `more` (B, k) on its diagonal."""
    return torch.linalg.cholesky_ex(rows @ rows.mT + torch.diag_embed(more.to(rows.dtype)))[0]


def sure_eigh(H: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`. Where it does not converge, as cuSOLVER's float32 may, LAPACK in float64 takes its place."""
    try:
        values, Z = torch.linalg.eigh(H)
    except torch.linalg.LinAlgError:
        if not H.isfinite().all():  # nothing finds these
            raise
        values, Z = torch.linalg.eigh(H.double().cpu())
    return values.to(H), Z.to(H)
