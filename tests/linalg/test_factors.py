"""Factors of semi-definite matrices and orthonormal bases against dense inverses and projectors, in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.linalg import gram_root, orthonormal_columns, solve_columns, sure_eigh
from matrices import F64, assert_orthonormal_or_zero, degenerate_batch, noise, projector

# --- the root of a gated basis -----------------------------------------------------------------------------


def basis_and_gate(k: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    """A sample whose units are all closed, and one with fewer open units than directions, are among them."""
    gate = (noise(batch, d, seed=1) > 0) * noise(batch, d, seed=2).abs()
    if batch > 2:
        gate[0] = 0
        gate[1, max(1, k - 2) :] = 0
    return torch.linalg.qr(noise(d, k))[0], gate


SHAPES = [((), 10, 64, 9), ((2, 3), 3, 7, 1), ((1,), 17, 60, 5), ((3,), 24, 90, 3), ((), 1, 5, 4)]


@pytest.mark.parametrize(("draws", "k", "d", "batch"), SHAPES)
def test_the_root_makes_the_gated_basis_orthonormal(draws: tuple[int, ...], k: int, d: int, batch: int) -> None:
    """The twin is Gram–Schmidt, which makes zeros of dependent columns."""
    V, gate = basis_and_gate(k, d, batch)
    L, Y = gram_root(V, gate), gate[:, :, None] * V
    Q = orthonormal_columns(Y)
    every = torch.eye(k, dtype=F64)[:, None].expand(k, batch, k)
    columns = torch.einsum("bdk,nbk->bdn", Y, solve_columns(L, every, transposed=True))
    torch.testing.assert_close(columns @ columns.mT, Q @ Q.mT, rtol=1e-8, atol=1e-8)
    plain = [b for b in range(batch) if b != 1]  # with few open units the ridge moves columns, not what they span
    z, v = noise(*draws, batch, k, seed=3), noise(*draws, batch, d, seed=4)
    found = torch.einsum("bdk,...bk->...bd", Y, solve_columns(L, z, transposed=True))
    expected = torch.einsum("bdk,...bk->...bd", Q, z)
    torch.testing.assert_close(found[..., plain, :], expected[..., plain, :], rtol=1e-9, atol=1e-9)
    found = solve_columns(L, torch.einsum("bdk,...bd->...bk", Y, v))
    expected = torch.einsum("bdk,...bd->...bk", Q, v)
    torch.testing.assert_close(found[..., plain, :], expected[..., plain, :], rtol=1e-9, atol=1e-9)


def test_the_root_of_a_sample_does_not_depend_on_its_neighbours() -> None:
    V, gate = basis_and_gate(6, 40, 5)
    found = gram_root(V, gate)
    gate[0], gate[4] = torch.nan, 1e30
    torch.testing.assert_close(gram_root(V, gate)[1:4], found[1:4], rtol=1e-12, atol=1e-12)


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
