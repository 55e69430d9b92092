"""Factors of semi-definite matrices and orthonormal bases against dense inverses and projectors, in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.linalg import orthonormal_columns, sure_eigh
from matrices import F64, assert_orthonormal_or_zero, degenerate_batch, noise
from references import projector

# --- the root of a gated basis -----------------------------------------------------------------------------


# --- orthonormal bases -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 2e-6)])
def test_orthonormal_columns_span_the_same(dtype: torch.dtype, atol: float) -> None:
    A, ranks = degenerate_batch(dtype)
    Q = orthonormal_columns(A)
    for q, a, rank in zip(Q, A, ranks, strict=True):
        assert int((q.norm(dim=0) > 0.5).sum()) == rank
        assert int((q.norm(dim=0) == 0).sum()) == 5 - rank  # zeros, not rounding
        torch.testing.assert_close(projector(projector(q)), projector(q), rtol=0, atol=atol)
        torch.testing.assert_close(projector(q) @ a, a, rtol=0, atol=10 * atol)


@pytest.mark.parametrize(("dtype", "angle"), [(torch.float32, 1e-3), (F64, 1e-6)])
def test_orthonormal_columns_keep_a_nearly_dependent_column(dtype: torch.dtype, angle: float) -> None:
    A = noise(1, 40, 3, dtype=dtype)
    A[0, :, 1] = A[0, :, 0] + angle * A[0, :, 1]
    Q = orthonormal_columns(A)
    assert_orthonormal_or_zero(Q, 3, 10 * torch.finfo(dtype).eps * 40)
    assert torch.linalg.matrix_norm((A - Q @ (Q.mT @ A)), 2) < 100 * torch.finfo(dtype).eps * 40


def test_orthonormal_columns_drop_exact_copies_whatever_the_scale() -> None:
    a = noise(30, 1, dtype=torch.float32)
    Q = orthonormal_columns(torch.cat([a, 1e18 * a, -a], 1) * 1e12)
    assert (Q.norm(dim=0) > 0).sum() == 1
    assert torch.isfinite(Q).all()


def test_a_dropped_column_does_not_act_on_those_behind_it() -> None:
    """It lies in the span but for rounding: what is left of it has a direction that means nothing."""
    A = noise(40, 3).float()
    A[:, 1] = A[:, 0] + 1e-7 * A[:, 1]
    expected = orthonormal_columns(A[:, ::2])
    torch.testing.assert_close(orthonormal_columns(A)[:, ::2], expected, rtol=0, atol=1e-6)


def test_orthonormal_columns_have_the_orientation_of_gram_schmidt() -> None:
    """Without it the columns of Gaussian noise would not have mean zero."""
    A = noise(50, 6, 4)
    T = orthonormal_columns(A).mT @ A
    assert (T.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(T.tril(-1), torch.zeros_like(T), rtol=0, atol=1e-12)


# --- eigenvectors ------------------------------------------------------------------------------------------


def test_an_eigensolver_that_does_not_converge_is_replaced(monkeypatch) -> None:
    A = noise(3, 5, 5).float()
    H, real = A @ A.mT, torch.linalg.eigh
    expected = torch.linalg.eigvalsh(H)

    def fails_in_float32(H: Tensor):
        if H.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 3): The algorithm failed to converge")
        return real(H)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    values, Z = sure_eigh(H)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(Z @ torch.diag_embed(values) @ Z.mT, H)
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        sure_eigh(H * torch.nan)


def test_of_rows_that_share_a_direction_about_to_be_lost_no_two_are_kept():
    """The second row is left with about as little as is still kept, and the third depends on the two before it."""
    least = 10 * (3 + 2**0.5) * torch.finfo(torch.float32).eps
    for share in torch.linspace(0.5, 2, 301).tolist():
        Q = orthonormal_columns(torch.tensor([[1.0, 1.0, 0.0], [0.0, share * least, 1.0]])).mT
        products = Q.double() @ Q.double().mT
        torch.testing.assert_close(products, products.diag().round().diag(), rtol=0, atol=1e-6)
