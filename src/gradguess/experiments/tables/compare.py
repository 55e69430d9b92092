"""Ours against the paper's: the statistics, and the rule by which a number holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradguess.experiments.paper_numbers import Published

HOLDS = "holds"
DIFFERS = "differs"
NOT_RUN = "not run"
UNCLEAR = "unclear"  # claims only: the two sides lie within the noise
NOT_COMPARED = "not compared"

RULES = (
    "The paper gives one run per number. With n ≥ 2 seeds a number holds if |ours − paper| ≤ "
    "2 s √(1 + 1/n) + r: s is the standard deviation of our runs over the seeds, √(1 + 1/n) adds the "
    "spread of the paper's single run to that of our mean, and r is half a unit of the paper's last digit.",
    "With one seed there is no standard deviation, and a fixed tolerance stands in for it: 0.03 for an "
    "accuracy, 5 % of the paper's value for the covariance norm.",
    "A rank counts the active units of a sample, and the paper does not say of which: it holds within 10 % of the "
    "layer's width.",
    "Bias and variance change by orders of magnitude during training, and the paper does not say at which "
    "step they were taken. Ours are of the last diagnosed epoch; they also hold within a factor of two.",
    "Training times come from different machines: they are shown and not compared. Claims about speed and "
    "memory compare our own runs on one kind of device.",
    "A claim that one side exceeds another holds if the difference of our means has the right sign and is "
    "larger than two standard errors; it is unclear within them, and differs beyond them on the wrong side. "
    "With one seed on either side the bar is 0.01 for accuracies and 5 % of the smaller side for all else.",
)

SINGLE_SEED_ACCURACY = 0.03
MAGNITUDE_FACTOR = 2.0


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


@dataclass(frozen=True)
class Kind:
    """How a quantity is named, set in type, and judged when there is a single seed."""

    name: str
    form: str
    single: Callable[[Published], float]  # the tolerance that stands in for a standard deviation
    factor: float | None = None  # ours also holds within this factor of the paper's
    slack: Callable[[Published], float] | None = None  # ours also holds within this distance, whatever our spread
    compared: bool = True


def _rank_tolerance(entry: Published) -> float:
    return 0.1 * entry.width


_KINDS = {
    "train_accuracy": Kind("Train accuracy", ".3f", lambda entry: SINGLE_SEED_ACCURACY),
    "test_accuracy": Kind("Test accuracy", ".3f", lambda entry: SINGLE_SEED_ACCURACY),
    "variance": Kind("Variance", ".2e", lambda entry: 0.0, factor=MAGNITUDE_FACTOR),
    "bias": Kind("Bias", ".2e", lambda entry: 0.0, factor=MAGNITUDE_FACTOR),
    "covariance_norm": Kind("Covariance norm", ".3f", lambda entry: 0.05 * entry.value),
    "rank": Kind("Rank", ".0f", _rank_tolerance, slack=_rank_tolerance),
    "seconds": Kind("Training time", "duration", lambda entry: math.inf, compared=False),
}


def kind_of(quantity: str) -> Kind:
    return _KINDS[quantity]


def tolerance(entry: Published, ours: Summary) -> float:
    """How far ours may lie from the paper's."""
    if ours.sd is None:
        return kind_of(entry.quantity).single(entry) + entry.rounding
    return 2 * ours.sd * math.sqrt(1 + 1 / ours.n) + entry.rounding


def verdict(entry: Published, ours: Summary | None) -> str:
    """Whether ours agrees with the published number, by `RULES`."""
    kind = kind_of(entry.quantity)
    if ours is None:
        return NOT_RUN
    if not kind.compared:
        return NOT_COMPARED
    if abs(ours.mean - entry.value) <= tolerance(entry, ours) * (1 + 1e-9):
        return HOLDS
    if kind.slack and abs(ours.mean - entry.value) <= kind.slack(entry):
        return HOLDS
    if kind.factor and 1 / kind.factor <= ours.mean / entry.value <= kind.factor:
        return HOLDS
    return DIFFERS
