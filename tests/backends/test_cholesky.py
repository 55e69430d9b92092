"""Factors of semi-definite matrices against LAPACK and dense inverses, in float64."""

import pytest
import torch
from torch import Tensor

from gradguess.backends import cholesky, kernels, small_cholesky
from gradguess.backends.cholesky import GramRoot, dropping_cholesky, semidefinite_cholesky, triangular_apply
from matrices import F64, degenerate_batch, noise, projector, span_projector


@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (torch.float32, 1e-4)])
def test_cholesky_gives_orthonormal_columns_of_the_same_span(dtype: torch.dtype, atol: float) -> None:
    Y, ranks = degenerate_batch(dtype)
    L, alive = semidefinite_cholesky(Y.mT @ Y)
    Q = (Y @ torch.linalg.inv(L).mT) * alive[:, None]
    assert alive.sum(-1).tolist() == ranks
    torch.testing.assert_close(Q.mT @ Q, torch.diag_embed(alive.to(dtype)), rtol=0, atol=atol)
    for q, y in zip(Q, Y, strict=True):
        torch.testing.assert_close(projector(q).double(), span_projector(y.double()), rtol=0, atol=atol)


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
    loop, loop_alive = dropping_cholesky(C, floor)
    assert torch.equal(alive, loop_alive)
    torch.testing.assert_close(L, loop, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("share", [0.995, 1.005])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_pivot_counts_from_100_k_eps_of_the_largest_on(dtype: torch.dtype, share: float) -> None:
    """The default that is documented, and that the kernel of a GPU has too, whatever the scale of the matrix."""
    k, eps = 3, torch.finfo(dtype).eps
    C = 7.0 * torch.diag_embed(torch.tensor([1.0, share * 100 * k * eps, 0.5], dtype=dtype))[None]
    assert semidefinite_cholesky(C)[1].tolist() == [[True, share > 1, True]]
    assert kernels.tolerance(k) == 100 * k * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (3, 7, 4), (1, 7, 4)])
def test_triangular_apply_is_the_dense_inverse(shape: tuple[int, ...], transpose: bool) -> None:
    Y = noise(7, 9, 4)
    L, _ = semidefinite_cholesky(Y.mT @ Y)
    z = noise(*shape, seed=1)
    inverse = torch.linalg.inv(L.mT if transpose else L)
    torch.testing.assert_close(triangular_apply(L, z, transpose), (inverse @ z[..., None])[..., 0])


# --- GramRoot ----------------------------------------------------------------------------------------------


def basis_and_gate(k: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    """A sample whose units are all closed, and one with fewer open units than directions, are among them."""
    gate = (noise(batch, d, seed=1) > 0) * noise(batch, d, seed=2).abs()
    if batch > 2:
        gate[0] = 0
        gate[1, max(1, k - 2) :] = 0
    return torch.linalg.qr(noise(d, k))[0], gate


def dense_root(V: Tensor, gate: Tensor) -> Tensor:
    """Twin: `C^{-½}` of each sample as a matrix (batch, k, k), zero columns where a direction was dropped."""
    roots = []
    for g in gate:
        L, alive = dropping_cholesky((V.mT @ (g.square()[:, None] * V))[None], (1e-13 * g.square().max())[None])
        roots.append(torch.linalg.inv(L[0]).mT * alive[0])
    return torch.stack(roots)


SHAPES = [(10, 64, 9), (3, 7, 1), (16, 40, 5), (17, 60, 5), (24, 40, 3), (1, 5, 4)]  # k, d, batch


@pytest.mark.parametrize("draws", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize(("k", "d", "batch"), SHAPES)
def test_gram_root_is_the_dense_one(k: int, d: int, batch: int, draws: tuple[int, ...]) -> None:
    V, gate = basis_and_gate(k, d, batch)
    z, exact = noise(*draws, batch, k, seed=3), dense_root(V, gate)
    root = GramRoot(V, gate.square())
    torch.testing.assert_close(root.solve(z), torch.einsum("bij,...bj->...bi", exact, z), rtol=1e-9, atol=1e-9)
    expected = torch.einsum("bji,...bj->...bi", exact, z)
    torch.testing.assert_close(root.solve(z, transposed=True), expected, rtol=1e-9, atol=1e-9)


def test_both_ways_of_a_cpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    V, gate = basis_and_gate(6, 30, 7)
    z = noise(2, 7, 6, seed=3)
    small = GramRoot(V, gate.square())
    monkeypatch.setattr(cholesky, "SMALL", 5)
    stacked = GramRoot(V, gate.square())
    for transposed in (False, True):
        found = small.solve(z, transposed)
        with monkeypatch.context() as patch:
            patch.setattr(small_cholesky, "cholesky", None)  # must not be called
            torch.testing.assert_close(found, stacked.solve(z, transposed), rtol=1e-9, atol=1e-9)
