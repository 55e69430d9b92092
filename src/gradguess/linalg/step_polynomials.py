"""Coefficients that turn repeated Newton–Schulz steps into a step function of the singular values.

`p(x) = a0 x + a1 x³ + a2 x⁵ + a3 x⁷`, applied five times, approximates `f_σ(x) = 0` on `[0, σ]` and `1` on `(σ, 1]`
for σ = 0.1, 0.2, ..., 0.9. `scripts/fit_newton_schulz.py` fits the nine sets and writes `step_polynomials.json`,
with the error that each reaches; `docs/figures/newton_schulz.svg` shows them.

How it works: σ is near an unstable fixed point of `p` and 1 near an attracting one, so every step drives values
away from σ by the slope `p'(σ)`. A small σ caps that slope, because `p` must stay near 1 on all of `[σ, 1]`: hence
the larger errors of the first two sets. The sets are fitted for five steps; for σ = 0.1 zero itself repels
(`a0 > 1`), and more steps would raise small values instead of lowering them.

Which threshold: W⊥ keeps the k largest singular values, σ_k included, so the step must fall between σ_k and σ_{k+1}.
`nearest` takes the nearest set, as the paper does: the step is then up to 0.05 σ_1 off, and more or fewer than k
directions pass. `placed` shrinks the matrix a little instead, so that the step falls where it should.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True)
class CoefficientSet:
    """One set and the error it reaches, measured every 1e-4.

    Attributes:
        sigma: the step's nominal place.
        coefficients: `a0, a1, a2, a3`.
        low: largest `|p^5|` on `[0, σ - 0.05]`.
        high: largest `|p^5 - 1|` on `[σ + 0.05, 1]`.
        rms: root mean square of `p^5 - f_σ` over all of `[0, 1]`, the transition included.
        overshoot: largest `|p^5 - 1|` on `[1, 1.1]`, for norms that were underestimated.
        crossing: where `p^5` first reaches one half.
        width: how far the rise from 0.1 to 0.9 around the crossing stretches.
    """

    sigma: float
    coefficients: Coefficients
    low: float
    high: float
    rms: float
    overshoot: float
    crossing: float
    width: float


@cache
def table() -> tuple[CoefficientSet, ...]:
    """The nine sets, by ascending σ.

    >>> [entry.sigma for entry in table()]
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    """
    stored = json.loads(files("gradguess.linalg").joinpath("step_polynomials.json").read_text(encoding="utf-8"))
    return tuple(CoefficientSet(**{**s, "coefficients": tuple(s["coefficients"])}) for s in stored["sets"])


def nearest(sigma: float) -> CoefficientSet:
    """The set whose σ is nearest to the ratio `sigma` = σ_k / σ_1."""
    return min(table(), key=lambda entry: abs(entry.sigma - sigma))


def placed(ratio: float) -> tuple[CoefficientSet, float]:
    """A set, and a factor for the matrix of unit norm, that put the step exactly at `ratio`, a part of σ_1.

    The factor is crossing over `ratio`. It must not exceed 1, so that no singular value leaves `[0, 1]`: that leaves
    the sets with a crossing up to `ratio`. Of these it is the one whose step is sharpest relative to its crossing.
    Below the lowest crossing the factor is 1, and the step is too high: fewer directions pass.

    >>> entry, factor = placed(0.75)
    >>> entry.sigma, round(factor * 0.75 - entry.crossing, 12)
    (0.5, 0.0)
    """
    below = [entry for entry in table() if entry.crossing <= ratio]
    if not below:
        return table()[0], 1.0
    entry = min(below, key=lambda entry: entry.width / entry.crossing)
    return entry, entry.crossing / ratio


def polynomial(G: Tensor, a: Sequence[float]) -> Tensor:
    """`Σ_j a_j G^j` by Horner's rule."""
    P = torch.zeros_like(G)
    P.diagonal(dim1=-2, dim2=-1).add_(a[-1])
    for i, c in enumerate(reversed(a[:-1])):
        P = G * a[-1] if i == 0 else P @ G
        P.diagonal(dim1=-2, dim2=-1).add_(c)
    return P
