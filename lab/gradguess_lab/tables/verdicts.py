"""The statistics: means over seeds, the one rule by which a published number holds, and Welch's tests for claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from gradguess_lab.paper_numbers import Published

HOLDS = "holds"
DIFFERS = "differs"
UNCLEAR = "unclear"  # claims only: the test decides neither way
ZERO = "zero to rounding"
SINGLE = "one run, not judged"
NOT_COMPARED = "not compared"
NOT_RUN = "not run"

LEVEL = 0.05  # of every test, and the share of true numbers that a prediction interval leaves outside
EPSILON = 2.0**-23  # of float32, in which the runs and the paper compute

RULES = (
    "The paper gives one run per number. With n ≥ 2 seeds a number holds if the paper's lies in Student's prediction "
    "interval of a single run: |ours − paper| ≤ t s √(1 + 1/n) + r. Here s is the standard deviation of our runs, t "
    "the 97.5 % quantile with n − 1 degrees of freedom, and r half a unit of the paper's last digit. There is no other "
    "tolerance. One number in twenty lies outside by chance. A single seed is not judged, nor are times of other "
    "machines.",
    "A bias that is zero by construction (Wᴾ) is zero to rounding if both are at most d ε ‖g‖/√B, as accurate as an "
    "orthonormal d × d matrix is in float32 (ε = 1.2e−7).",
    "A claim that one side exceeds another holds if a one-sided Welch test at 5 % says so, differs if it says the "
    "opposite, and is unclear otherwise. A claim of several comparisons is as strong as its weakest.",
    "A claim that two sides are the same differs if a two-sided Welch test at 5 % rejects it. It holds if that test "
    "does not reject and two one-sided tests at 5 % put the difference within the margin that the claim names.",
    "A claim of a gap holds if the paper's gap lies in the prediction interval of ours, paired by seed. A claim of "
    "growth holds if every step and the slope over log₂ of the width are larger than zero by one-sided tests at 5 %.",
)


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over seeds; no deviation from one seed.

    >>> Summary.of([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    """

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        if not values:
            return None
        if not all(math.isfinite(value) for value in values):
            return cls(math.nan, None, len(values))  # a diverged seed is not averaged away
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))

    @property
    def reach(self) -> float | None:
        """Half of the interval in which one more run lies with 95 %; None from one seed.

        >>> round(Summary(0.3, 0.01, 10).reach, 4)
        0.0237
        """
        if self.sd is None:
            return None
        return float(stats.t.ppf(1 - LEVEL / 2, self.n - 1)) * self.sd * math.sqrt(1 + 1 / self.n)


def within(value: float, rounding: float, ours: Summary) -> bool | None:
    """Whether a published value lies in our prediction interval; None if there is no interval."""
    return None if ours.reach is None else abs(ours.mean - value) <= (ours.reach + rounding) * (1 + 1e-9)


def verdict(entry: Published, ours: Summary | None, noise_floor: float | None = None) -> str:
    """Whether ours agrees with the published number, by `RULES`.

    `noise_floor` is what rounding alone may make of a quantity that is zero by construction; None for all others.
    """
    if ours is None:
        return NOT_RUN
    if entry.quantity == "seconds":
        return NOT_COMPARED
    if math.isnan(ours.mean):
        return DIFFERS  # the paper's runs ended
    if noise_floor is not None and max(abs(entry.value), abs(ours.mean)) <= noise_floor:
        return ZERO
    holds = within(entry.value, entry.rounding, ours)
    return SINGLE if holds is None else HOLDS if holds else DIFFERS


def rounding_floor(width: int, gradient_norm: float, batch: int) -> float:
    """The bias that float32 leaves of one that is zero: `d ε ‖g‖/√B`.

    >>> f"{rounding_floor(256, 0.03, 512):.1e}"
    '4.0e-08'
    """
    return width * EPSILON * gradient_norm / math.sqrt(batch)


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error and degrees of freedom.

    An error of zero is taken at its word. An error of NaN is that of single runs, which are not judged; a value of NaN
    is that of a run that diverged, which differs.
    """

    value: float
    error: float
    df: float

    def interval(self, level: float = 1 - LEVEL) -> tuple[float, float]:
        reach = float(stats.t.ppf((1 + level) / 2, self.df)) * self.error
        return self.value - reach, self.value + reach

    def exceeds(self, bound: float = 0.0) -> str:
        """One-sided tests at the stated level, in both directions."""
        low, high = self.interval(1 - 2 * LEVEL)
        return self._judged(low > bound, high < bound)

    def is_zero(self, margin: float) -> str:
        """Not different from zero, and by two one-sided tests within the margin."""
        low, high = self.interval()
        return self._judged(low <= 0 <= high and self.is_small(margin) == HOLDS, not low <= 0 <= high)

    def is_small(self, margin: float) -> str:
        """Within the margin by two one-sided tests; differs if it is beyond it on one side by such a test."""
        low, high = self.interval(1 - 2 * LEVEL)
        return self._judged(-margin < low and high < margin, low > margin or high < -margin)

    def _judged(self, holds: bool, differs: bool) -> str:
        if math.isnan(self.value):
            return DIFFERS
        if math.isnan(self.error):
            return SINGLE
        return HOLDS if holds else DIFFERS if differs else UNCLEAR


def difference(a: Summary, b: Summary) -> Estimate:
    """`b - a` by Welch."""
    parts = [math.nan if one.sd is None else one.sd**2 / one.n for one in (a, b)]
    spread = sum(part**2 / max(one.n - 1, 1) for part, one in zip(parts, (a, b), strict=True))
    return Estimate(b.mean - a.mean, math.sqrt(sum(parts)), sum(parts) ** 2 / spread if spread else math.inf)


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """Least squares of y over x, from three points or more."""
    fit = stats.linregress(*zip(*points, strict=True))
    error = 0.0 if math.isnan(fit.stderr) else float(fit.stderr)  # SciPy's where all y are equal
    return Estimate(float(fit.slope), error, len(points) - 2)
