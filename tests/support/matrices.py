"""Matrices with known spectra, and dense, slow twins in float64."""

import torch
from torch import Tensor

from gradguess.jacobian import GatedLinear

F64 = torch.float64


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def of_rank(rank: int, m: int, d: int, seed: int = 0) -> Tensor:
    """(m, d) with singular values 1, 1/2, ..., 1/rank."""
    U, _ = torch.linalg.qr(noise(m, m, seed=seed))
    V, _ = torch.linalg.qr(noise(d, d, seed=seed + 1))
    return (U[:, :rank] / torch.arange(1, rank + 1)) @ V[:, :rank].mT


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


def gated_jacobians(m: int = 40, d: int = 30, batch: int = 6) -> GatedLinear:
    """Gates of a ReLU and of something smoother; a sample with all units closed and one with all open."""
    gate = (noise(batch, d, seed=1) > 0).to(F64)
    gate[2] *= noise(d, seed=2).abs()
    gate[0], gate[1] = 0, 1
    return GatedLinear(noise(m, d) / d**0.5, gate)
