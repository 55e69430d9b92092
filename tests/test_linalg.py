"""The linear algebra against dense, slow twins in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.linalg import (
    _cholesky_rows,
    _dropping_cholesky,
    batched_top_subspace,
    chebyshev_top_subspace,
    largest_singular,
    newton_schulz,
    orthonormal_columns,
    semidefinite_cholesky,
    top_right_singular_vectors,
    triangular_apply,
)

F64 = torch.float64


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def of_rank(rank: int, m: int, d: int, seed: int = 0) -> Tensor:
    """(m, d) with singular values 1, 1/2, ..., 1/rank."""
    U, _ = torch.linalg.qr(noise(m, m, seed=seed))
    V, _ = torch.linalg.qr(noise(d, d, seed=seed + 1))
    return (U[:, :rank] / torch.arange(1, rank + 1)) @ V[:, :rank].mT


def projector(V: Tensor) -> Tensor:
    return V @ V.mT


def top_projector(A: Tensor, k: int) -> Tensor:
    """Twin: the projector on the top-k right singular vectors, from the dense SVD, cut at the rank."""
    _, S, Vh = torch.linalg.svd(A, full_matrices=False)
    V = Vh[:k].mT * (S[:k] > 1e-10 * S[0])
    return projector(V)


def span_projector(A: Tensor) -> Tensor:
    """Twin: the projector on the column span."""
    return A @ torch.linalg.pinv(A, rtol=1e-10)


def assert_orthonormal_or_zero(V: Tensor, rank: int, atol: float) -> None:
    expected = torch.zeros(V.shape[-1], dtype=V.dtype)
    expected[:rank] = 1
    expected = torch.diag(expected).expand(*V.shape[:-2], -1, -1)
    torch.testing.assert_close(V.mT @ V, expected, rtol=0, atol=atol)


def degenerate_batch(dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Y (6, 12, 5) and the rank of each: full, zero, a repeated column, 3 rows, graded, a zero column."""
    Y = noise(6, 12, 5, dtype=dtype)
    Y[1] = 0
    Y[2, :, 3] = 2 * Y[2, :, 1]
    Y[3, 3:] = 0
    Y[4] *= torch.tensor([1.0, 1e-1, 1e-1, 1.0, 1e-1])
    Y[5, :, 0] = 0
    return Y, [5, 0, 4, 3, 5, 4]


# --- semidefinite_cholesky, triangular_apply ---------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 1e-4)])
def test_cholesky_gives_orthonormal_columns_of_the_same_span(dtype: torch.dtype, atol: float) -> None:
    Y, ranks = degenerate_batch(dtype)
    L, alive = semidefinite_cholesky(Y.mT @ Y)
    Q = (Y @ torch.linalg.inv(L).mT) * alive[:, None]
    assert alive.sum(-1).tolist() == ranks
    torch.testing.assert_close(Q.mT @ Q, torch.diag_embed(alive.to(dtype)), rtol=0, atol=atol)
    for q, y in zip(Q, Y, strict=True):
        torch.testing.assert_close(projector(q).double(), span_projector(y.double()), rtol=0, atol=atol)


def test_cholesky_equals_lapack_on_definite_matrices() -> None:
    Y = noise(4, 9, 6)
    L, alive = semidefinite_cholesky(Y.mT @ Y)
    assert alive.all()
    torch.testing.assert_close(L, torch.linalg.cholesky(Y.mT @ Y), rtol=1e-12, atol=1e-12)


def test_cholesky_of_dependent_columns_has_unit_pivots_and_zeros_below() -> None:
    Y, _ = degenerate_batch(F64)
    L, alive = semidefinite_cholesky(Y.mT @ Y)
    expected = torch.eye(5, dtype=F64).expand(6, 5, 5)
    dead = ~alive[:, None].expand_as(L)
    torch.testing.assert_close(L[dead], expected[dead], rtol=0, atol=0)
    assert (L.triu(1) == 0).all()


def test_the_loop_agrees_with_lapack() -> None:
    """What runs away from the CPU is the loop; here it is compared on the CPU."""
    Y, _ = degenerate_batch(F64)
    C = Y.mT @ Y
    floor = 500 * 2.3e-16 * C.diagonal(dim1=-2, dim2=-1).amax(-1)
    L, alive = semidefinite_cholesky(C)
    loop, loop_alive = _dropping_cholesky(C, floor)
    assert torch.equal(alive, loop_alive)
    torch.testing.assert_close(L, loop, rtol=1e-11, atol=1e-11)


def test_cholesky_of_one_by_one() -> None:
    L, alive = semidefinite_cholesky(torch.tensor([[[4.0]], [[0.0]]]))
    assert L.flatten().tolist() == [2.0, 1.0]
    assert alive.flatten().tolist() == [True, False]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (3, 7, 4), (1, 7, 4)])
def test_triangular_apply_is_the_dense_inverse(shape: tuple[int, ...], transpose: bool) -> None:
    Y = noise(7, 9, 4)
    L, _ = semidefinite_cholesky(Y.mT @ Y)
    z = noise(*shape, seed=1)
    inverse = torch.linalg.inv(L.mT if transpose else L)
    torch.testing.assert_close(triangular_apply(L, z, transpose), (inverse @ z[..., None])[..., 0])


# --- orthonormal_columns -----------------------------------------------------------------------------------


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
    Q = orthonormal_columns(A) if lapack else _cholesky_rows(A.mT, 100 * torch.finfo(dtype).eps)[0].mT
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
    rows, _ = _cholesky_rows(A.mT, 1e-13)
    torch.testing.assert_close(rows.mT, orthonormal_columns(A), rtol=0, atol=1e-11)


def test_orthonormal_columns_more_than_rows() -> None:
    Q = orthonormal_columns(noise(2, 3, 5))
    assert Q.shape == (2, 3, 5)
    assert_orthonormal_or_zero(Q, 3, 1e-12)


# --- top_right_singular_vectors ----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "d", "k"), [(30, 20, 5), (12, 40, 5), (7, 7, 7), (1, 9, 1), (9, 1, 1)])
def test_top_right_singular_vectors_match_the_svd(m: int, d: int, k: int) -> None:
    A = noise(m, d)
    V = top_right_singular_vectors(A, k)
    torch.testing.assert_close(projector(V), top_projector(A, k), rtol=0, atol=1e-9)
    columns = torch.linalg.vector_norm(A @ V, dim=0)
    torch.testing.assert_close(columns, torch.linalg.svdvals(A)[:k])  # largest first


@pytest.mark.parametrize(("m", "d"), [(30, 20), (12, 40), (20, 20)])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("rank", "k"), [(3, 6), (0, 6), (6, 50)])
def test_directions_beyond_the_rank_are_zero(m: int, d: int, rank: int, k: int, warm: bool) -> None:
    A = of_rank(rank, m, d)
    V = top_right_singular_vectors(A, k, warm=noise(d, 8) if warm else None)
    assert V.shape == (d, k)
    assert_orthonormal_or_zero(V, rank, 1e-9)
    torch.testing.assert_close(projector(V), top_projector(A, k), rtol=0, atol=1e-7)


def test_warm_start_needs_few_products() -> None:
    """From a basis that is off by 1e-2, three products reach what a random one does not come near."""
    A = of_rank(30, 60, 50)
    exact = top_right_singular_vectors(A, 5)
    warm = top_right_singular_vectors(A, 5, warm=exact + 1e-2 * noise(50, 5) / 50**0.5, iterations=3)
    cold = top_right_singular_vectors(A, 5, warm=noise(50, 5), iterations=3)
    assert torch.linalg.matrix_norm(projector(warm) - projector(exact), 2) < 5e-4
    assert torch.linalg.matrix_norm(projector(cold) - projector(exact), 2) > 1e-2


def test_float32_input_is_solved_in_float64() -> None:
    A = (of_rank(6, 40, 30) * torch.logspace(0, -3, 40, dtype=F64)[:, None]).float()
    V = top_right_singular_vectors(A, 6)
    assert V.dtype == torch.float32
    torch.testing.assert_close(projector(V.double()), top_projector(A.double(), 6), rtol=0, atol=1e-6)


# --- largest_singular --------------------------------------------------------------------------------------


def lanczos(A: Tensor, steps: int) -> Tensor:
    start = noise(len(A), A.shape[-1], seed=3, dtype=A.dtype)
    return largest_singular(lambda v: (A @ v[..., None])[..., 0], lambda u: (A.mT @ u[..., None])[..., 0], start, steps)


@pytest.mark.parametrize(("m", "d"), [(20, 12), (8, 30), (1, 5), (5, 1)])
def test_lanczos_is_exact_with_all_steps(m: int, d: int) -> None:
    A = noise(3, m, d)
    torch.testing.assert_close(lanczos(A, d), torch.linalg.svdvals(A)[:, 0])


@pytest.mark.parametrize(("steps", "error"), [(8, 4e-2), (20, 3e-3)])
def test_lanczos_without_a_gap_reaches_the_stated_error(steps: int, error: float) -> None:
    A = (2 * torch.rand(4, 512, 512, generator=torch.Generator().manual_seed(0)) - 1) / 16
    A = A * (torch.rand(4, 1, 512, generator=torch.Generator().manual_seed(1)) < 0.5)
    found, exact = lanczos(A, steps), torch.linalg.svdvals(A.double())[:, 0]
    assert (found <= exact * (1 + 1e-6)).all()
    assert (found >= exact * (1 - error)).all()


def test_lanczos_handles_low_rank_zero_and_repeated_values() -> None:
    A = torch.stack([of_rank(2, 16, 16), torch.zeros(16, 16, dtype=F64), torch.eye(16, dtype=F64)])
    torch.testing.assert_close(lanczos(A, 12), torch.tensor([1.0, 0.0, 1.0], dtype=F64), rtol=0, atol=1e-10)


def test_solvers_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    lanczos(noise(1, 4, 4), 4)
    batched_top_subspace(lambda X: X, noise(1, 4, 2), 2, 2)
    assert torch.equal(before, torch.get_rng_state())


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


def test_subspace_stays_orthonormal_over_many_steps() -> None:
    A = (2 * torch.rand(2, 128, 128, generator=torch.Generator().manual_seed(0)) - 1) / 128**0.5
    V, _ = subspace(A, 10, 1, 100)
    assert_orthonormal_or_zero(V, 10, 1e-5)


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


def test_subspace_from_a_converged_start() -> None:
    A = of_rank(8, 20, 20)
    V = top_right_singular_vectors(A, 3)
    again, _ = batched_top_subspace(lambda X: A.mT @ (A @ X), V[None], 3, 3)
    torch.testing.assert_close(projector(again[0]), projector(V), rtol=0, atol=1e-9)


# --- newton_schulz -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 9), (5, 12), (12, 5), (3, 6, 6), (2, 3, 4, 7), (1, 1)])
def test_newton_schulz_is_the_polynomial_on_the_singular_values(shape: tuple[int, ...]) -> None:
    a = (0.3, 1.1, -0.7, 0.2)
    A = noise(*shape)
    A = A / torch.linalg.matrix_norm(A, 2, keepdim=True)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    for _ in range(3):
        S = a[0] * S + a[1] * S**3 + a[2] * S**5 + a[3] * S**7
    torch.testing.assert_close(newton_schulz(A, a, 3), U @ torch.diag_embed(S) @ Vh, rtol=0, atol=1e-9)


def test_newton_schulz_with_one_set_per_matrix() -> None:
    sets = torch.tensor([[0.3, 1.1, -0.7, 0.2], [1.5, -0.5, 0.0, 0.0]], dtype=F64)
    A = noise(2, 5, 8) / 6
    together = newton_schulz(A, sets, 2)
    apart = torch.stack([newton_schulz(x, s.tolist(), 2) for x, s in zip(A, sets, strict=True)])
    torch.testing.assert_close(together, apart)


def test_newton_schulz_leaves_its_argument_alone() -> None:
    A = noise(4, 4) / 4
    before = A.clone()
    newton_schulz(A, (0.5, 0.5), 2)
    assert torch.equal(A, before)


def test_zero_steps_and_the_zero_matrix() -> None:
    A = noise(3, 4)
    assert torch.equal(newton_schulz(A, (2.0, 1.0), 0), A)
    assert (newton_schulz(torch.zeros(2, 3), (2.0, 1.0, 1.0, 1.0), 5) == 0).all()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("top", [1.0, 3.0, 30.0])
def test_chebyshev_finds_the_top_even_under_one_far_above(top, dense):
    """One eigenvalue that dwarfs the others must not swallow the block (float32, a block of 16 in 200)."""
    generator = torch.Generator().manual_seed(0)
    W = (torch.rand(200, 200, generator=generator) * 2 - 1) / 200**0.5
    u, v = torch.randn(2, 200, generator=generator)
    W = W + (top - 1) * torch.outer(u, v) / 200
    gate = (torch.rand(5, 200, generator=generator) > 0.5).float()
    jacobians = (W * gate[:, None]).double()
    exact = torch.linalg.svd(jacobians)[2][:, :10].mT
    start = torch.randn(5, 200, 16, generator=generator) * gate[:, :, None]
    gram = W.t() @ W
    whole = gram * gate[:, :, None] * gate[:, None, :]
    times = whole if dense else lambda X: gate[:, :, None] * (gram @ (gate[:, :, None] * X))
    found, values = chebyshev_top_subspace(times, start, 10, degree=4, rounds=8)
    found = found.double()
    difference = found @ found.mT - exact @ exact.mT
    assert torch.linalg.matrix_norm(difference, 2).max() < 1e-2
    torch.testing.assert_close(values.sqrt().double(), torch.linalg.svdvals(jacobians)[:, :10], rtol=1e-3, atol=1e-4)
