"""Top singular subspaces against the dense SVD, in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.linalg import (
    batched_top_subspace,
    followed_bases,
    largest_eigenvalue,
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


# --- largest_eigenvalue ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "error"), [(8, 4e-2), (20, 3e-3)])
def test_lanczos_without_a_gap_reaches_the_stated_error(steps: int, error: float) -> None:
    A = (2 * torch.rand(4, 512, 512, generator=torch.Generator().manual_seed(0)) - 1) / 16
    A = A * (torch.rand(4, 1, 512, generator=torch.Generator().manual_seed(1)) < 0.5)
    start = noise(4, 512, seed=3, dtype=A.dtype)
    found = largest_eigenvalue(lambda x: (A.mT @ (A @ x[..., None]))[..., 0], start, steps).sqrt()
    exact = torch.linalg.svdvals(A.double())[:, 0]
    assert (found <= exact * (1 + 1e-6)).all()
    assert (found >= exact * (1 - error)).all()


def test_lanczos_ends_with_the_space() -> None:
    """Rank two, nothing at all, and one eigenvalue four times: eight steps see no more than there is."""
    A = torch.stack([of_rank(2, 16, 16), torch.zeros(16, 16, dtype=F64), torch.eye(16, dtype=F64)])
    found = largest_eigenvalue(lambda x: (A.mT @ (A @ x[..., None]))[..., 0], noise(3, 16), 8)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 1.0], dtype=F64))


# --- batched_top_subspace ----------------------------------------------------------------------------------


def subspace(A: Tensor, k: int, p: int, start: Tensor | None = None) -> Tensor:
    start = noise(p, len(A), A.shape[-1], seed=5) if start is None else start
    rank = min(A.shape[1:])
    return batched_top_subspace(lambda X: gram(A, X), start.to(A), noise(A.shape[-1], k, seed=6).to(A), rank)


def gram(A: Tensor, X: Tensor) -> Tensor:
    return (A.mT @ (A @ X.permute(1, 2, 0))).permute(2, 0, 1)


def errors(V: Tensor, A: Tensor, k: int) -> Tensor:
    """`‖P - P*‖_F` of each, with P* from the SVD in float64."""
    exact = torch.stack([top_projector(a.double(), k) for a in A])
    return torch.linalg.matrix_norm(projector(V.double()) - exact)


@pytest.mark.parametrize(("m", "d", "k", "p"), [(20, 12, 4, 12), (8, 30, 8, 8), (5, 1, 1, 1), (8, 30, 3, 9)])
def test_subspace_is_exact_when_the_block_spans_the_rows(m: int, d: int, k: int, p: int) -> None:
    A = noise(3, m, d)
    assert errors(subspace(A, k, p), A, k).max() < 1e-9


@pytest.mark.parametrize(("d", "error"), [(24, 1e-9), (64, 1e-9), (128, 1e-5)])
def test_subspace_of_any_matrix_in_float64(d: int, error: float) -> None:
    A = noise(16, d, d) / d**0.5 * (noise(16, 1, d, seed=2) > 0)
    assert errors(subspace(A, 4, 14), A, 4).median() < error


def masked(d: int, samples: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix as `nn.Linear` has it at first, masks of half of its columns, and a start of what they share."""
    W = (2 * torch.rand(d, d, generator=torch.Generator().manual_seed(0)) - 1) / d**0.5
    mask = (torch.rand(samples, d, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    basis = top_right_singular_vectors(W, 20).t() + noise(20, d, dtype=torch.float32) / (10 * d**0.5)
    return W, mask, basis[:, None] * mask


@pytest.mark.parametrize(("d", "median", "most"), [(128, 4e-6, 1e-4), (256, 6e-6, 1e-4)])
def test_subspace_of_masked_weights_reaches_the_stated_error(d: int, median: float, most: float) -> None:
    W, mask, start = masked(d)
    A = W * mask[:, None]
    error = errors(subspace(A, 10, 20, start), A, 10)
    assert error.median() < median
    assert error.max() < most


@pytest.mark.parametrize(("rate", "error"), [(0.9, 3e-6), (0.8, 1e-5), (0.6, 1e-3)])
def test_weak_directions_are_found_beside_strong_ones(rate: float, error: float) -> None:
    """In float32, under singular values that fall by a constant rate: the squares of ten of them by up to 1e4."""
    _, mask, start = masked(200)
    U, V = (torch.linalg.qr(noise(200, 200, seed=seed))[0] for seed in (3, 4))
    A = ((U * rate ** torch.arange(200)) @ V.mT).float() * mask[:, None]
    assert errors(subspace(A, 10, 20, start), A, 10).max() < error


def test_subspace_handles_low_rank_zero_and_repeated_values() -> None:
    A = torch.stack([of_rank(2, 16, 16), torch.zeros(16, 16, dtype=F64), torch.eye(16, dtype=F64)])
    for dtype, atol in ((F64, 1e-10), (torch.float32, 1e-5)):
        for p in (8, 16):
            V = subspace(A.to(dtype), 4, p)
            for v, rank in zip(V, (2, 0, 4), strict=True):
                assert_orthonormal_or_zero(v, rank, atol)
            torch.testing.assert_close(projector(V[0].double()), top_projector(A[0], 2), rtol=0, atol=atol)


@pytest.mark.parametrize(("strong", "equal"), [(3, 5), (1, 9), (7, 2), (0, 12)])
def test_among_equal_directions_some_are_taken_and_none_of_the_strong_ones_missed(strong: int, equal: int) -> None:
    sizes = torch.cat([torch.full((n,), s, dtype=F64) for n, s in ((strong, 2.0), (equal, 1.0), (40, 0.5))])
    Q = torch.stack([torch.linalg.qr(noise(len(sizes), len(sizes), seed=seed))[0] for seed in range(20)])
    V = subspace(sizes[:, None] * Q.mT, 8, 18)
    assert_orthonormal_or_zero(V[0], 8, 1e-10)
    missed = Q[..., :strong] - V @ (V.mT @ Q[..., :strong])
    beyond = V.mT @ Q[..., strong + equal :]
    assert torch.linalg.matrix_norm(missed).amax() < 1e-2
    assert torch.linalg.matrix_norm(beyond).amax() < 1e-5


@pytest.mark.parametrize("k", [4, 6])
def test_a_direction_close_to_nothing_is_told_from_nothing(k: int) -> None:
    """Squared, the last of four singular values is 1e-12 of the first; the other eight are zero."""
    U, V = (torch.linalg.qr(noise(100, 12, 4, seed=seed))[0] for seed in (1, 2))
    A = U * torch.tensor([1.0, 0.4, 3e-3, 1e-6], dtype=F64) @ V.mT
    torch.testing.assert_close(projector(subspace(A, k, 12)), projector(V), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("d", "k"), [(3, 1), (5, 2), (12, 5), (24, 4)])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_where_all_directions_are_equal_any_will_do(d: int, k: int, dtype: torch.dtype) -> None:
    for v in subspace(torch.eye(d, dtype=dtype).expand(100, d, d), k, min(d, k + 10)):
        assert_orthonormal_or_zero(v, k, 1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("d", "rank", "p"), [(48, 36, 48), (24, 14, 20), (12, 3, 4), (12, 1, 12)])
def test_subspace_stays_orthonormal_when_the_space_ends(
    d: int, rank: int, p: int, dtype: torch.dtype, atol: float
) -> None:
    """200 matrices of low rank."""
    A = noise(200, d, rank, dtype=dtype) @ noise(200, rank, d, seed=1, dtype=dtype) / d
    V = subspace(A, d, p)
    P = projector(V)
    torch.testing.assert_close(P @ P, P, rtol=0, atol=atol)
    assert ((V.norm(dim=-2) > 0.5).sum(-1) == rank).all()


def test_a_start_that_is_no_help_is_left() -> None:
    """Diagonal matrices keep every basis of unit vectors: it is the noise beside them that finds the others."""
    A = torch.diag_embed(torch.rand(8, 40, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.1)
    start = torch.eye(40, dtype=F64)[:14, None] + noise(14, 8, 40, seed=3) / 60
    assert errors(subspace(A, 4, 14, start), A, 4).median() < 1e-5


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
