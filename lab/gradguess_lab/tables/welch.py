"""Two groups of runs compared: Welch's test of their means, and of the equivalence of their means."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from gradguess_lab.tables.compare import DIFFERS, HOLDS, LEVEL, UNCLEAR, Summary


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error and degrees of freedom; an error of zero is taken at its word."""

    value: float
    error: float
    df: float

    def chance_below(self, bound: float) -> float:
        """How surprising this value is if the truth is at most `bound`: the p-value of a one-sided test."""
        return float(stats.t.sf(self._t(bound), self.df))

    def chance_above(self, bound: float) -> float:
        return float(stats.t.cdf(self._t(bound), self.df))

    def interval(self, share: float = 1 - LEVEL) -> tuple[float, float]:
        if not self.error:
            return self.value, self.value
        low, high = stats.t.interval(share, self.df, self.value, self.error)
        return float(low), float(high)

    def _t(self, bound: float) -> float:
        distance = self.value - bound
        if self.error:
            return distance / self.error
        return math.copysign(math.inf, distance) if distance else 0.0

    # --- verdicts ---

    def exceeds(self, bound: float = 0.0) -> str:
        """One-sided tests at the stated level, in both directions."""
        if math.isnan(self.value):
            return DIFFERS
        if self.chance_below(bound) < LEVEL:
            return HOLDS
        return DIFFERS if self.chance_above(bound) < LEVEL else UNCLEAR

    def is_zero(self, margin: float) -> str:
        """Not different from zero, and by two one-sided tests within the margin."""
        low, high = self.interval()
        if math.isnan(self.value) or not low <= 0 <= high:
            return DIFFERS
        return HOLDS if self._inside(margin) else UNCLEAR

    def is_small(self, margin: float) -> str:
        """Within the margin by two one-sided tests; differs if it is beyond it on one side by such a test."""
        if math.isnan(self.value):
            return DIFFERS
        if self._inside(margin):
            return HOLDS
        beyond = min(self.chance_below(margin), self.chance_above(-margin))
        return DIFFERS if beyond < LEVEL else UNCLEAR

    def _inside(self, margin: float) -> bool:
        return self.chance_above(margin) < LEVEL and self.chance_below(-margin) < LEVEL


def difference(a: Summary, b: Summary) -> Estimate | None:
    """`b - a` by Welch; None if either side is a single run."""
    if a.sd is None or b.sd is None:
        return Estimate(math.nan, 0.0, 1.0) if math.isnan(b.mean - a.mean) else None
    parts = [s.sd**2 / s.n for s in (a, b) if s.sd is not None]
    error = math.sqrt(sum(parts))
    spread = sum(part**2 / (s.n - 1) for part, s in zip(parts, (a, b), strict=True))
    return Estimate(b.mean - a.mean, error, sum(parts) ** 2 / spread if spread else math.inf)


def mean_of(a: Summary) -> Estimate | None:
    """The mean itself; None for a single run."""
    if a.sd is None:
        return Estimate(a.mean, 0.0, 1.0) if math.isnan(a.mean) else None
    return Estimate(a.mean, a.sd / math.sqrt(a.n), a.n - 1)


def slope(points: list[tuple[float, float]]) -> Estimate | None:
    """Least squares of y over x; None without three points or without two different x."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    fit = stats.linregress(*zip(*points, strict=True))
    return Estimate(float(fit.slope), float(fit.stderr), len(points) - 2)
