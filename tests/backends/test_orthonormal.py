"""Orthonormal bases against dense projectors, in float64 and float32."""

import pytest
import torch

from gradguess.backends.orthonormal import cholesky_qr_rows, orthonormal_columns, orthonormal_rows, positive
from matrices import F64, assert_orthonormal_or_zero, degenerate_batch, noise, projector


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 2e-6)])
def test_orthonormal_columns_span_the_same(dtype: torch.dtype, atol: float) -> None:
    A, ranks = degenerate_batch(dtype)
    Q = orthonormal_columns(A)
    for q, a, rank in zip(Q, A, ranks, strict=True):
        assert int((q.norm(dim=0) > 0.5).sum()) == rank
        assert int((q.norm(dim=0) == 0).sum()) == 5 - rank  # zeros, not rounding
        torch.testing.assert_close(projector(projector(q)), projector(q), rtol=0, atol=atol)
        torch.testing.assert_close(projector(q) @ a, a, rtol=0, atol=10 * atol)


@pytest.mark.parametrize("lapack", [True, False])
@pytest.mark.parametrize(("dtype", "angle"), [(torch.float32, 1e-3), (F64, 1e-9)])
def test_orthonormal_columns_keep_a_nearly_dependent_column(dtype: torch.dtype, angle: float, lapack: bool) -> None:
    A = noise(1, 40, 3, dtype=dtype)
    A[0, :, 1] = A[0, :, 0] + angle * A[0, :, 1]
    Q = orthonormal_columns(A) if lapack else cholesky_qr_rows(A.mT, 100 * torch.finfo(dtype).eps)[0].mT
    assert_orthonormal_or_zero(Q, 3, 10 * torch.finfo(dtype).eps * 40)
    assert torch.linalg.matrix_norm((A - Q @ (Q.mT @ A)), 2) < 100 * torch.finfo(dtype).eps * 40


def test_orthonormal_columns_drop_exact_copies_whatever_the_scale() -> None:
    a = noise(30, 1, dtype=torch.float32)
    Q = orthonormal_columns(torch.cat([a, 1e18 * a, -a], 1) * 1e12)
    assert (Q.norm(dim=0) > 0).sum() == 1
    assert torch.isfinite(Q).all()


def test_orthonormal_columns_have_the_orientation_of_gram_schmidt() -> None:
    """Without it the columns of Gaussian noise would not have mean zero."""
    A = noise(50, 6, 4)
    T = orthonormal_columns(A).mT @ A
    assert (T.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(T.tril(-1), torch.zeros_like(T), rtol=0, atol=1e-12)


def test_orthonormal_columns_away_from_lapack() -> None:
    """What runs away from the CPU is Cholesky QR; here it is compared on the CPU."""
    A, _ = degenerate_batch(F64)
    rows, _ = cholesky_qr_rows(A.mT, 1e-13)
    torch.testing.assert_close(rows.mT, orthonormal_columns(A), rtol=0, atol=1e-11)


@pytest.mark.parametrize("lapack", [True, False])
def test_orthonormal_rows_say_what_was_left(lapack: bool) -> None:
    """The norm of each row after the rows before it, as a share of the largest row."""
    R = noise(2, 3, 9) * torch.tensor([[1.0], [5.0], [0.1]])
    _, left = orthonormal_rows(R) if lapack else cholesky_qr_rows(R, 1e-13)
    for a, found in zip(R, left[..., 0], strict=True):
        residual = torch.stack([a[j] - a[j] @ torch.linalg.pinv(a[:j]) @ a[:j] for j in range(3)])
        torch.testing.assert_close(found, residual.norm(dim=-1) / a.norm(dim=-1).max())


def test_one_pass_keeps_what_it_finds_dependent() -> None:
    """The product that follows can tell it apart, as the next pass does here."""
    R = torch.eye(4, dtype=torch.float64)[None, :3].repeat(1, 1, 5)
    R[0, 2] = R[0, 1] + 1e-9 * torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rough, rows = (cholesky_qr_rows(R, 1e-13, passes)[0][0] for passes in (1, 3))
    assert 0 < rough[2].norm() < 1e-7
    assert rows[2].norm() == pytest.approx(1)
    torch.testing.assert_close(rough[:2], rows[:2])


def test_a_divisor_is_positive() -> None:
    assert positive(torch.tensor([2.0, 0.0, -1.0])).tolist() == [2.0, 1.0, 1.0]
