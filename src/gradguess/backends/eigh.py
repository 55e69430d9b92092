"""Eigenvectors of symmetric matrices, also where the routine of a device does not converge."""

from __future__ import annotations

import torch
from torch import Tensor


def sure_eigh(H: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`. Where it does not converge, as cuSOLVER's float32 may, LAPACK in float64 takes its place."""
    try:
        values, Z = torch.linalg.eigh(H)
    except torch.linalg.LinAlgError:
        if not H.isfinite().all():  # nothing finds these
            raise
        values, Z = torch.linalg.eigh(H.double().cpu())
    return values.to(H), Z.to(H)
