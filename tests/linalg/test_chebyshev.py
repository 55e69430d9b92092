"""Filtered subspace iteration against the dense SVD."""

import pytest
import torch

from gradguess.linalg import chebyshev_top_subspace


@pytest.mark.parametrize("top", [1.0, 3.0, 30.0])
def test_chebyshev_finds_the_top_even_under_one_far_above(top):
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
    times = lambda X: gate[:, :, None] * (gram @ (gate[:, :, None] * X))  # noqa: E731
    found, values = chebyshev_top_subspace(times, start, 10, degree=4, rounds=8)
    found = found.double()
    difference = found @ found.mT - exact @ exact.mT
    assert torch.linalg.matrix_norm(difference, 2).max() < 1e-2
    torch.testing.assert_close(values.sqrt().double(), torch.linalg.svdvals(jacobians)[:, :10], rtol=1e-3, atol=1e-4)
