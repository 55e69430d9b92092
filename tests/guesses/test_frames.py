"""The gated basis against dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.guesses import GatedBasis

SHAPES = [(10, 300, 4, 1), (3, 40, 18, 2), (15, 130, 3, 1), (1, 7, 3, 1)]  # k, d, batch, tangents


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def basis_and_gate(k: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    """A sample whose units are all closed, and one with fewer open units than directions, are among them."""
    gate = (noise(batch, d, seed=1) > 0) * noise(batch, d, seed=2).abs()
    gate[0] = 0
    gate[1, max(1, k - 2) :] = 0
    return torch.linalg.qr(noise(d, k))[0], gate


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("k", "d", "batch", "n"), SHAPES)
def test_a_direction_is_that_of_the_gated_basis(k, d, batch, n, binary):
    """The twin is a QR decomposition of every sample's `D V`; in sample 1 it would have directions too many."""
    V, gate = basis_and_gate(k, d, batch)
    gate = (gate > 0).float() if binary else gate
    z = noise(n, batch, k, seed=3)
    Q, R = torch.linalg.qr(gate.double()[:, :, None] * V.double())
    expected = torch.einsum("bdk,nbk->nbd", Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None], z.double())
    frame = GatedBasis(V, gate, batch, binary)
    found = frame.apply(z)
    torch.testing.assert_close(found[:, 2:].double(), expected[:, 2:], rtol=1e-5, atol=1e-6)
    assert (found[:, 0] == 0).all()
    v = noise(n, batch, d, seed=4)
    torch.testing.assert_close((frame.adjoint(v) * z).sum(-1), (v * found).sum(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_have_a_projector_as_covariance(dtype):
    """Also where fewer units are open than there are directions: to rounding, not to its root."""
    V, gate = (t.to(dtype) for t in basis_and_gate(6, 60, 4))
    every = torch.eye(6, dtype=dtype)[:, None].expand(6, 4, 6).contiguous()
    columns = GatedBasis(V, gate, 4).apply(every)  # A, column by column
    for b in range(4):
        A = columns[:, b].mT
        P, open_ = A @ A.mT, gate[b] != 0
        torch.testing.assert_close(P @ P, P, rtol=0, atol=20 * torch.finfo(dtype).eps + 1e-9)
        assert round(float(P.trace())) == min(6, int(open_.sum()))
        assert (P[~open_] == 0).all()
