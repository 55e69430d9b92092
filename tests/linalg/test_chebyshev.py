"""Filtered subspace iteration against the dense SVD."""

import pytest
import torch
from torch import Tensor

from gradguess.backends import sure_eigh
from gradguess.linalg import chebyshev_top_subspace, steady_top_subspace


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


@pytest.mark.parametrize("top", [1.0, 3.0])
def test_steady_rounds_find_the_top(top):
    """Rounds of fixed degrees, here with LAPACK's eigenvectors (`test_kernels` has those of the kernel)."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(4, 60, 60, generator=generator, dtype=torch.float64)
    W[0] += (top - 1) * torch.outer(*torch.randn(2, 60, generator=generator, dtype=torch.float64))
    G = W.mT @ W / 60
    start = torch.randn(4, 60, 32, generator=generator, dtype=torch.float64)
    V, values = steady_top_subspace(G, start, 6, (2, 4, 4))
    exact, vectors = torch.linalg.eigh(G)
    exact, vectors = exact.flip(-1)[:, :6], vectors.flip(-1)[..., :6]
    assert torch.linalg.matrix_norm(V @ V.mT - vectors @ vectors.mT, 2).max() < 1e-2
    torch.testing.assert_close(values, exact, rtol=1e-3, atol=1e-4)


def test_an_eigensolver_that_does_not_converge_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails(H: Tensor) -> tuple[Tensor, Tensor]:
        if H.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 3): The algorithm failed to converge")
        return real(H)

    A = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
    H = A @ A.mT
    expected = real(H)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, Z = sure_eigh(H)
    torch.testing.assert_close(values, expected[0])
    torch.testing.assert_close(Z @ torch.diag_embed(values) @ Z.mT, H)
    with pytest.raises(torch.linalg.LinAlgError):
        sure_eigh(H * torch.nan)
