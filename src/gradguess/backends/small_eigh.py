"""Eigenvalues of symmetric matrices: LAPACK or cuSOLVER, or a kernel that does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess.backends import kernels

__all__ = ["eigh", "largest_eigenvalue", "sure_eigh"]


def sure_eigh(H: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`. Where it does not converge, as cuSOLVER's float32 may, LAPACK in float64 takes its place."""
    try:
        values, Z = torch.linalg.eigh(H)
    except torch.linalg.LinAlgError:
        if not H.isfinite().all():  # nothing finds these
            raise
        values, Z = torch.linalg.eigh(H.double().cpu())
    return values.to(H), Z.to(H)


def eigh(H: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues (B, n), ascending, and eigenvectors (B, n, n) of symmetric matrices (B, n, n).

    On a GPU, in float32 and for n up to 32, a kernel makes `sweeps` sweeps of Jacobi's method and does not wait for the
    device. Eight sweeps reach rounding, some 1e-5 of the largest eigenvalue at n = 32; three leave about a hundredth
    where a matrix is far from diagonal. Elsewhere this is `sure_eigh`, and `sweeps` has no effect.
    """
    return kernels.eigh(H, sweeps) if kernels.usable(H, H.shape[-1]) else sure_eigh(H)


def largest_eigenvalue(T: Tensor) -> Tensor:
    """The largest eigenvalue of each symmetric matrix: (B, n, n) -> (B,). Only the lower triangles are read.

    Accuracy: rounding. On a GPU, in float32 and for n up to 32, it does not wait for the device.
    """
    if kernels.usable(T, T.shape[-1]):
        return kernels.eigh(T.tril() + T.tril(-1).mT)[0][:, -1]
    return torch.linalg.eigvalsh(T, UPLO="L")[:, -1]
