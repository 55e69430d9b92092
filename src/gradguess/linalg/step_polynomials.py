"""Coefficients that turn repeated Newton–Schulz steps into a step function of the singular values (eqs. (9) and (10)).

`p(x) = a0 x + a1 x³ + a2 x⁵ + a3 x⁷`, applied five times, approximates `f_σ(x) = 0` on `[0, σ]` and `1` on `(σ, 1]`
for σ = 0.1, 0.2, ..., 0.9. `scripts/fit_newton_schulz.py` fits the nine sets and writes them into this file;
`docs/figures/newton_schulz.svg` shows them with the error that each reaches.

How it works: σ is near an unstable fixed point of `p` and 1 near an attracting one, so every step drives values
away from σ by the slope `p'(σ)`. A small σ caps that slope, because `p` must stay near 1 on all of `[σ, 1]`: hence
the larger errors of the first two sets. The sets are fitted for five steps; for σ = 0.1 zero itself repels
(`a0 > 1`), and more steps would raise small values instead of lowering them.

Which threshold: W⊥ keeps the k largest singular values, σ_k included, so the step must fall between σ_k and σ_{k+1}.
`nearest` takes the nearest set, as the paper does: the step is then up to 0.05 σ_1 off, and more or fewer than k
directions pass. `placed` shrinks the matrix a little instead, so that the step falls where it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Coefficients = tuple[float, float, float, float]


class CoefficientSet(NamedTuple):
    """One set of coefficients.

    Attributes:
        sigma: the step's nominal place.
        coefficients: `a0, a1, a2, a3`.
        crossing: where `p^5` first reaches one half, to 1e-4.
        width: how far the rise from 0.1 to 0.9 around the crossing stretches.
    """

    sigma: float
    coefficients: Coefficients
    crossing: float
    width: float


SETS = (
    CoefficientSet(0.1, (1.267924, 2.676715, -5.454312, 2.493427), 0.1036, 0.1118),
    CoefficientSet(0.2, (0.928942, 3.993536, -7.085399, 3.134319), 0.2106, 0.1246),
    CoefficientSet(0.3, (0.634583, 4.864642, -7.944202, 3.421912), 0.3083, 0.0661),
    CoefficientSet(0.4, (0.310424, 5.413504, -8.179412, 3.450364), 0.4104, 0.0312),
    CoefficientSet(0.5, (-0.060589, 6.17661, -8.552127, 3.436082), 0.499, 0.0163),
    CoefficientSet(0.6, (-0.125657, 5.037514, -6.132071, 2.220175), 0.5992, 0.0261),
    CoefficientSet(0.7, (-0.212094, 4.2192, -4.141657, 1.135014), 0.6975, 0.0308),
    CoefficientSet(0.8, (-0.180653, 2.941133, -1.71813, -0.038526), 0.7995, 0.0339),
    CoefficientSet(0.9, (-0.044411, 1.21428, 1.032016, -1.186406), 0.901, 0.029),
)


def nearest(sigma: float) -> CoefficientSet:
    """The set whose σ is nearest to the ratio `sigma` = σ_k / σ_1."""
    return min(SETS, key=lambda entry: abs(entry.sigma - sigma))


def placed(ratio: float) -> tuple[CoefficientSet, float]:
    """A set, and a factor for the matrix of unit norm, that put the step exactly at `ratio`, a part of σ_1.

    The factor is crossing over `ratio`. It must not exceed 1, so that no singular value leaves `[0, 1]`: that leaves
    the sets with a crossing up to `ratio`. Of these it is the one whose step is sharpest relative to its crossing.
    Below the lowest crossing the factor is 1, and the step is too high: fewer directions pass.

    >>> entry, factor = placed(0.75)
    >>> entry.sigma, round(factor * 0.75 - entry.crossing, 12)
    (0.5, 0.0)
    """
    below = [entry for entry in SETS if entry.crossing <= ratio]
    if not below:
        return SETS[0], 1.0
    entry = min(below, key=lambda entry: entry.width / entry.crossing)
    return entry, entry.crossing / ratio


def polynomial(G: Tensor, a: Sequence[float]) -> Tensor:
    """`Σ_j a_j G^j` by Horner's rule: the even part `q` of eq. (9), `p(X) = X q(XᵀX)`."""
    P = torch.zeros_like(G)
    P.diagonal(dim1=-2, dim2=-1).add_(a[-1])
    for i, c in enumerate(reversed(a[:-1])):
        P = G * a[-1] if i == 0 else P @ G
        P.diagonal(dim1=-2, dim2=-1).add_(c)
    return P
