"""Top singular subspaces against the dense SVD, in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.linalg import (
    batched_top_subspace,
    followed_bases,
    orthonormal_columns,
    top_right_singular_vectors,
)
from matrices import F64, assert_orthonormal_or_zero, noise, of_rank
from references import projector, top_projector

# --- top_right_singular_vectors ----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "d", "k"), [(30, 20, 5), (12, 40, 5), (7, 7, 7), (1, 9, 1), (9, 1, 1)])
def test_top_right_singular_vectors_match_the_svd(m: int, d: int, k: int) -> None:
    A = noise(m, d)
    V = top_right_singular_vectors(A, k)
    torch.testing.assert_close(projector(V), top_projector(A, k), rtol=0, atol=1e-9)
    columns = torch.linalg.vector_norm(A @ V, dim=0)
    torch.testing.assert_close(columns, torch.linalg.svdvals(A)[:k])  # largest first


@pytest.mark.parametrize(("m", "d"), [(30, 20), (12, 40), (20, 20)])
@pytest.mark.parametrize(("rank", "k"), [(3, 6), (0, 6), (6, 50)])
def test_directions_beyond_the_rank_are_zero(m: int, d: int, rank: int, k: int) -> None:
    A = of_rank(rank, m, d)
    V = top_right_singular_vectors(A, k)
    assert V.shape == (d, k)
    assert_orthonormal_or_zero(V, rank, 1e-9)
    torch.testing.assert_close(projector(V), top_projector(A, k), rtol=0, atol=1e-7)


# --- a block of one column: the largest singular value -----------------------------------------------------


def lanczos(A: Tensor, steps: int) -> Tensor:
    start = noise(len(A), A.shape[-1], 1, seed=3, dtype=A.dtype)
    return batched_top_subspace(lambda X: A.mT @ (A @ X), start, 1, steps)[1][:, 0].sqrt()


@pytest.mark.parametrize(("steps", "error"), [(8, 4e-2), (20, 3e-3)])
def test_lanczos_without_a_gap_reaches_the_stated_error(steps: int, error: float) -> None:
    A = (2 * torch.rand(4, 512, 512, generator=torch.Generator().manual_seed(0)) - 1) / 16
    A = A * (torch.rand(4, 1, 512, generator=torch.Generator().manual_seed(1)) < 0.5)
    found, exact = lanczos(A, steps), torch.linalg.svdvals(A.double())[:, 0]
    assert (found <= exact * (1 + 1e-6)).all()
    assert (found >= exact * (1 - error)).all()


# --- batched_top_subspace ----------------------------------------------------------------------------------


def subspace(A: Tensor, k: int, p: int, iterations: int) -> tuple[Tensor, Tensor]:
    start = noise(A.shape[0], A.shape[-1], p, seed=5, dtype=A.dtype)
    return batched_top_subspace(lambda X: A.mT @ (A @ X), start, k, iterations)


@pytest.mark.parametrize(("m", "d", "k", "p", "iterations"), [(20, 12, 4, 3, 4), (8, 30, 8, 8, 4), (5, 1, 1, 2, 3)])
def test_subspace_is_exact_when_the_space_is_full(m: int, d: int, k: int, p: int, iterations: int) -> None:
    A = noise(3, m, d)
    V, values = subspace(A, k, p, iterations)
    torch.testing.assert_close(values, torch.linalg.svdvals(A)[:, :k] ** 2)
    for v, a in zip(V, A, strict=True):
        torch.testing.assert_close(projector(v), top_projector(a, k), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("trained", "p", "iterations"), [(False, 1, 48), (False, 2, 28), (True, 2, 10)])
def test_subspace_of_masked_weights_reaches_the_stated_error(trained: bool, p: int, iterations: int) -> None:
    d, k = 128, 10
    rng = torch.Generator().manual_seed(0)
    W = (2 * torch.rand(d, d, generator=rng) - 1) / d**0.5
    if trained:
        U, V = orthonormal_columns(torch.randn(2, d, k, generator=rng))
        W += 3 * U @ V.mT
    A = W * (torch.rand(16, 1, d, generator=rng) < 0.5)
    V, _ = subspace(A, k, p, iterations)
    exact = torch.stack([top_projector(a.double(), k) for a in A])
    error = torch.linalg.matrix_norm(projector(V.double()) - exact, 2)
    assert error.median() < 1e-2


def test_subspace_handles_low_rank_zero_and_repeated_values() -> None:
    A = torch.stack([of_rank(2, 16, 16), torch.zeros(16, 16, dtype=F64), torch.eye(16, dtype=F64)])
    V, values = subspace(A, 4, 1, 12)
    expected = torch.tensor([[1, 0.25, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=F64)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)
    for v, rank in zip(V, (2, 0, 4), strict=True):
        assert_orthonormal_or_zero(v, rank, 1e-10)


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("d", "rank", "p", "iterations"), [(48, 36, 9, 8), (24, 14, 6, 4), (12, 3, 4, 3), (12, 1, 1, 12)]
)
def test_subspace_stays_orthonormal_when_the_space_ends(
    d: int, rank: int, p: int, iterations: int, dtype: torch.dtype, atol: float
) -> None:
    """200 matrices: the last blocks have fewer dimensions left than columns, and much of them is rounding."""
    A = noise(200, d, rank, dtype=dtype) @ noise(200, rank, d, seed=1, dtype=dtype) / d
    V, _ = subspace(A, d, p, iterations)
    P = projector(V)
    torch.testing.assert_close(P @ P, P, rtol=0, atol=atol)
    assert ((V.norm(dim=-2) > 0.5).sum(-1) == rank).all()


def followed_basis(A: Tensor, k: int, warm: Tensor | None) -> Tensor:
    return followed_bases([A], [k], [warm])[0]


def test_a_basis_that_is_followed_is_the_exact_one_where_there_is_a_gap() -> None:
    """Three iterations from a basis of a matrix that has moved a little: the error falls as the sixth power."""
    generator = torch.Generator().manual_seed(3)
    U, V = (torch.linalg.qr(torch.randn(n, 12, generator=generator, dtype=F64))[0] for n in (60, 40))
    values = torch.tensor([1.0] * 4 + [0.3] * 8, dtype=F64)
    A = U * values @ V.mT
    start = torch.linalg.qr(V[:, :4] + 0.3 * torch.randn(40, 4, generator=generator, dtype=F64) / 40**0.5)[0]
    before = projector(start) - projector(V[:, :4])
    after = projector(followed_basis(A, 4, start)) - projector(V[:, :4])
    assert torch.linalg.matrix_norm(after, 2) < 1.5 * 0.3**6 * torch.linalg.matrix_norm(before, 2)


@pytest.mark.parametrize("k", [4, 21], ids=["lacks a direction", "half as large as the matrix"])
def test_a_basis_that_cannot_be_followed_is_found_anew(k: int) -> None:
    generator = torch.Generator().manual_seed(4)
    A = torch.randn(60, 40, generator=generator, dtype=F64)
    warm = torch.linalg.qr(torch.randn(40, k, generator=generator, dtype=F64))[0]
    warm[:, -1] *= k > 4
    torch.testing.assert_close(projector(followed_basis(A, k, warm)), top_projector(A, k))


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)], ids=["tall", "wide"])
def test_a_basis_is_followed_by_three_iterations(shape) -> None:
    """The slow twin multiplies by `AᵀA` and orthonormalises by Gram–Schmidt, three times."""
    generator = torch.Generator().manual_seed(6)
    A = torch.randn(*shape, generator=generator, dtype=F64)
    warm = torch.linalg.qr(torch.randn(shape[1], 4, generator=generator, dtype=F64))[0]
    expected = warm
    for _ in range(3):
        Q, R = torch.linalg.qr(A.t() @ A @ expected)
        expected = Q * R.diagonal().sign()
    torch.testing.assert_close(followed_basis(A, 4, warm), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128)], ids=["wide", "tall"])
@pytest.mark.parametrize("scale", [1.0, 1e12])
def test_weak_directions_beside_a_strong_one_are_followed(shape, scale) -> None:
    """In float32, the tenth singular value a hundredth of the first: none of the ten is lost."""
    generator = torch.Generator().manual_seed(7)
    Q, R = (torch.linalg.qr(torch.randn(n, 128, generator=generator, dtype=F64))[0] for n in shape)
    sizes = torch.cat([torch.logspace(0, -2, 10, dtype=F64), torch.full((118,), 1e-3, dtype=F64)])
    A = (scale * Q * sizes @ R.t()).float()
    warm = torch.linalg.qr(R[:, :10] + 0.1 * torch.randn(shape[1], 10, generator=generator, dtype=F64))[0].float()
    found = followed_basis(A, 10, warm).double()
    assert torch.linalg.matrix_norm(found @ found.t() - R[:, :10] @ R[:, :10].t(), 2) < 3e-3


def test_bases_that_are_found_together_are_those_found_one_by_one() -> None:
    """Followed or not, of several shapes and sizes, in an order that mixes them."""
    generator = torch.Generator().manual_seed(8)
    shapes = [(60, 40), (40, 60), (60, 40), (3, 50), (40, 60), (60, 40), (60, 40)]
    matrices = [torch.randn(*shape, generator=generator, dtype=F64) for shape in shapes]
    sizes = [4, 4, 4, 3, 4, 5, 4]
    warm: list[Tensor | None] = [
        torch.linalg.qr(torch.randn(A.shape[1], k, generator=generator, dtype=F64))[0]
        for A, k in zip(matrices, sizes, strict=True)
    ]
    warm[2] = None
    found = followed_bases(matrices, sizes, warm)
    for V, *one in zip(found, matrices, sizes, warm, strict=True):
        torch.testing.assert_close(V, followed_basis(*one), rtol=1e-10, atol=1e-11)
