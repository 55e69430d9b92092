"""Rank, singular values and overlap of the Jacobian above a site, from dense decompositions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def decompose(W: Tensor, g: Tensor) -> dict[str, Any]:
    """Of `W` (n, m, d), with the gradients `g` (n, d) of the same samples."""
    n, m, d = W.shape
    values, curves = g.new_zeros(n, d), g.new_zeros(n, d)
    ranks = g.new_zeros(n)
    for i in range(n):
        alive = (W[i] != 0).any(0)  # closed units have singular value zero: half of them under a ReLU
        _, S, Vh = torch.linalg.svd(W[i][:, alive], full_matrices=False)
        if len(S) == 0:
            continue
        real = S / S[0] > max(m, d) * torch.finfo(W.dtype).eps
        ranks[i], values[i, : len(S)] = real.sum(), S.double()
        inside = ((Vh.double() @ g[i, alive]) * real).square().cumsum(0)  # ‖V_k V_kᵀ g‖²
        curves[i] = inside[-1]
        curves[i, : len(S)] = inside
    lengths = g.square().sum(1)
    seen = lengths > 0
    overlap = (curves[seen] / lengths[seen, None]).clamp_max(1).sqrt().mean(0).tolist() if seen.any() else None
    return {
        "rank": ranks.mean().item(),
        "singular_values": tuple(values.mean(0).tolist()),
        "overlap": None if overlap is None else tuple(overlap),
    }
