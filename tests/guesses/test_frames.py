"""Frames: the gated basis against dense matrices, on a CPU and with the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.backends import cholesky, kernels
from gradguess.backends.cholesky import dropping_cholesky, triangular_apply
from gradguess.guesses import GatedBasis

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(10, 300, 4, 1), (3, 40, 18, 2), (15, 130, 3, 1), (1, 7, 3, 1)]  # k, d, batch, tangents


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def basis_and_gate(k: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    """A sample whose units are all closed, and one with fewer open units than directions, are among them."""
    gate = (noise(batch, d, seed=1) > 0) * noise(batch, d, seed=2).abs()
    gate[0] = 0
    gate[1, max(1, k - 2) :] = 0
    return torch.linalg.qr(noise(d, k))[0], gate


def on(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.fixture(params=["plain", "kernels"])
def path(request, monkeypatch):
    """As this machine does it, and as a GPU does it."""
    if request.param == "kernels":
        pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA")
        monkeypatch.setattr(kernels, "usable", lambda t, k=1: t.dtype == torch.float32 and k <= kernels.LARGEST)
        monkeypatch.setattr(cholesky, "SMALL", 0)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("k", "d", "batch", "n"), SHAPES)
def test_a_direction_is_that_of_the_gated_basis(k, d, batch, n, binary, path):
    V, gate = basis_and_gate(k, d, batch)
    gate = (gate > 0).float() if binary else gate
    z = noise(n, batch, k, seed=3)
    C = torch.einsum("dk,bd,dl->bkl", V, gate.square(), V)
    rtol = 100 * k * torch.finfo(torch.float32).eps  # the tolerance is that of float32, in which the matrices were made
    L, alive = dropping_cholesky(C.double(), rtol * C.double().diagonal(dim1=-2, dim2=-1).amax(-1))
    expected = torch.einsum("bd,dk,nbk->nbd", gate.double(), V.double(), triangular_apply(L, z * alive))
    V, gate, z = on(V, gate, z)
    found = GatedBasis(V, gate, batch, binary).apply(z).cpu()
    # a sample with few open units keeps pivots down to 2e-3 of the largest: rounding is as many times larger
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[:, 2:].double(), expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert (found[:, 0] == 0).all()


def test_directions_have_a_projector_as_covariance(path):
    V, gate = basis_and_gate(6, 60, 4)
    every = torch.eye(6)[:, None].expand(6, 4, 6).contiguous()
    columns = GatedBasis(*on(V, gate), 4).apply(every.to(DEVICE)).cpu()  # A, column by column
    for b in range(4):
        A = columns[:, b].mT
        P = A @ A.mT
        torch.testing.assert_close(P @ P, P, rtol=0, atol=1e-4)
        assert round(float(P.trace())) == int(torch.linalg.matrix_rank(gate[b, :, None] * V))


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("d", [64, 2056])
def test_the_frame_uses_the_kernels_of_a_gpu(d):
    V, gate = basis_and_gate(5, d, 4)
    frame = GatedBasis(*on(V, gate), 4)
    z = noise(2, 4, 5, seed=3)
    expected = GatedBasis(V.double(), gate.double(), 4).apply(z.double())
    torch.testing.assert_close(frame.apply(z.to(DEVICE)).cpu().double(), expected, rtol=1e-4, atol=1e-5)
