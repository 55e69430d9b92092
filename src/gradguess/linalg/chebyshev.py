"""Top eigenvectors of many matrices by subspace iteration with a Chebyshev filter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradguess.backends import orthonormal_columns, positive, sure_eigh
from gradguess.linalg.ritz import Product, ritz_pairs

__all__ = ["chebyshev_top_subspace"]


def chebyshev_top_subspace(gram: Product, start: Tensor, k: int, degree: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Top-k eigenvectors of `batch` positive semi-definite matrices by filtered subspace iteration.

    Each round takes the smallest Ritz value of the block as the end of the unwanted part of the spectrum, `[0, a]`, and
    applies the Chebyshev polynomial of that interval, which stays below one on it and grows fastest above it. More
    products than `batched_top_subspace`, but no eigenvalue problem larger than the block.
    Where one eigenvalue lies far above the others a round stops early, before it swallows the block.
    Waits for the device.

    Accuracy: 512 × 512, no spectral gap, k = 10, block of 16, six rounds of degree 4: projector error 4e-4, and below
    1e-4 on trained weights. Reference: Zhou, Saad, Tiago, Chelikowsky 2006.

    Args:
        gram: (B, d, p) -> (B, d, p).
        start: (B, d, p), more columns than `k`.
        degree: of the filter in one round, at most.
        rounds: `degree * rounds` products with the block are spent.

    Returns:
        V (B, d, k), orthonormal, largest eigenvalue first, and the eigenvalues (B, k); zero beyond the rank.
    """
    X = orthonormal_columns(start)
    left = degree * rounds
    while left > 0:
        GX = gram(X)
        values, Z = sure_eigh(_without_dust(_symmetric(X.mT @ GX)))
        high = values[:, -1:].clamp_min(torch.finfo(values.dtype).tiny)
        edge = torch.maximum(values[:, :1], 1e-3 * high)  # (B, 1)
        now = min(degree, left, _safe_degree(float((high / edge).max()), X.dtype))
        left -= now
        X = _filtered(gram, X @ Z, GX @ Z, edge[..., None] / 2, now)
    return ritz_pairs(X.mT, _without_dust(_symmetric(X.mT @ gram(X))), k)


def _safe_degree(ratio: float, dtype: torch.dtype) -> int:
    """The degree up to which the strongest direction, `ratio` times the edge, leaves the others visible.

    The filter makes it `T_n(2 ratio - 1) = cosh(n acosh(2 ratio - 1))` times as strong.
    """
    largest = 1 / (8 * torch.finfo(dtype).eps)
    return max(1, int(math.acosh(largest) / math.acosh(2 * max(ratio, 1.01) - 1)))


def _filtered(gram: Product, X: Tensor, GX: Tensor, half: Tensor, degree: int) -> Tensor:
    """`T_degree((G - half) / half) X`, orthonormalised; the columns of `X` are Ritz vectors, weakest first."""
    before, now = X, GX / half - X
    for _ in range(degree - 1):
        before, now = now, 2 * (gram(now) / half - now) - before
    now = now / positive(torch.linalg.vector_norm(now, dim=-2, keepdim=True))  # how strong it is does not matter here
    return orthonormal_columns(now.flip(-1))  # strongest first: Gram–Schmidt keeps them


def _symmetric(H: Tensor) -> Tensor:
    return (H + H.mT) / 2


def _without_dust(H: Tensor) -> Tensor:
    """Entries far below rounding as zeros: LAPACK's `eigh` fails on numbers near the smallest that there are."""
    return torch.where(H.abs() > torch.finfo(H.dtype).eps ** 2 * H.abs().amax((-2, -1), keepdim=True), H, 0.0)
