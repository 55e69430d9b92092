"""Eigenvectors of a large matrix from an orthonormal basis of a subspace (Rayleigh–Ritz)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradguess.backends import positive, sure_eigh

__all__ = ["Product", "pad_columns", "ritz_pairs"]

Product = Callable[[Tensor], Tensor]


def ritz_pairs(Q: Tensor, H: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The top-k Ritz pairs from orthonormal rows `Q` (B, s, d) and `H = Q G Qᵀ` (its lower triangle).

    V (B, d, k), largest eigenvalue first, and the eigenvalues (B, k); zero beyond the rank.
    """
    scale = positive(H.abs().amax((-2, -1), keepdim=True))
    values, Z = sure_eigh(H / scale)
    values = values.flip(-1)[..., :k]
    floor = 10 * Q.shape[-1] ** 0.5 * torch.finfo(Q.dtype).eps * values[..., :1]
    values = torch.where(values > floor, values, 0.0)
    V = (Z.flip(-1)[..., :k].mT @ Q).mT * (values[..., None, :] > 0)
    return pad_columns(V, k), pad_columns(values * scale[..., 0], k)


def pad_columns(V: Tensor, k: int) -> Tensor:
    """`V` with zero columns on the right until there are `k`."""
    return torch.nn.functional.pad(V, (0, k - V.shape[-1]))
