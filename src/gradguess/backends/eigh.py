"""Eigenvalues of symmetric matrices, also where the routine of a device does not converge."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sure_eigh", "sure_eigvalsh"]


def sure_eigh(H: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`. Where it does not converge, as cuSOLVER's float32 may, LAPACK in float64 takes its place."""
    try:
        values, Z = torch.linalg.eigh(H)
    except torch.linalg.LinAlgError:
        if not H.isfinite().all():  # nothing finds these
            raise
        values, Z = torch.linalg.eigh(H.double().cpu())
    return values.to(H), Z.to(H)


def sure_eigvalsh(H: Tensor) -> Tensor:
    """`torch.linalg.eigvalsh`, and where it does not converge the eigenvalues of `sure_eigh`."""
    try:
        values: Tensor = torch.linalg.eigvalsh(H)
    except torch.linalg.LinAlgError:
        values, _ = sure_eigh(H)
    return values
