"""The rule behind a verdict, at its edges: a prediction interval, and no slack of any kind."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from gradguess_lab.paper_numbers import Published
from gradguess_lab.tables.compare import (
    DIFFERS,
    HOLDS,
    NOT_COMPARED,
    NOT_RUN,
    SINGLE,
    ZERO,
    Summary,
    rounding_floor,
    verdict,
)

ACCURACY = Published("t", "wt", 128, "train_accuracy", "0.312")
BIAS = Published("t", "wt", 128, "bias", "2.75e-4", layer=1)


def test_summary_is_mean_and_sample_deviation():
    values = [0.30, 0.33, 0.36]
    assert Summary.of(values) == Summary(statistics.fmean(values), statistics.stdev(values), 3)
    assert Summary.of([0.3]) == Summary(0.3, None, 1)
    assert Summary.of([]) is None


def test_a_diverged_seed_is_not_averaged_away():
    summary = Summary.of([0.3, math.nan])
    assert math.isnan(summary.mean)
    assert verdict(ACCURACY, summary) == DIFFERS


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(("n", "t"), [(2, 12.7062047), (3, 4.3026527), (10, 2.2621572)])
def test_the_limit_is_student_s_prediction_interval_and_the_rounding(side: int, n: int, t: float):
    limit = t * 0.01 * math.sqrt(1 + 1 / n) + 0.0005
    assert verdict(ACCURACY, Summary(0.312 + side * (limit - 1e-6), 0.01, n)) == HOLDS
    assert verdict(ACCURACY, Summary(0.312 + side * (limit + 1e-6), 0.01, n)) == DIFFERS


def test_one_run_in_twenty_falls_outside():
    draw = random.Random(0)
    entry = Published("t", "wt", 128, "train_accuracy", "0.30000000")
    found = 0
    for _ in range(4000):
        values = [draw.gauss(0.3, 0.01) for _ in range(11)]
        ours = Summary.of(values[:-1])
        moved = Summary(ours.mean - values[-1] + entry.value, ours.sd, ours.n)  # as if the eleventh were the paper's
        found += verdict(entry, moved) == DIFFERS
    assert 0.04 < found / 4000 < 0.06


def test_one_seed_is_not_judged():
    assert verdict(ACCURACY, Summary(0.312, None, 1)) == SINGLE
    assert verdict(BIAS, Summary(0.01, None, 1)) == SINGLE


def test_zero_to_rounding_needs_both_below_the_floor():
    entry = Published("t", "wp", 256, "bias", "1.35e-8", layer=1)
    floor = rounding_floor(256, 0.03, 512)
    assert verdict(entry, Summary(0.0, 0.0, 10), floor) == ZERO
    assert verdict(entry, Summary(2 * floor, 0.0, 10), floor) == DIFFERS
    assert verdict(entry, Summary(0.0, 0.0, 10), 1e-8) == DIFFERS
    assert verdict(entry, Summary(0.0, 0.0, 10)) == DIFFERS


def test_times_are_not_compared_and_missing_runs_are_not_run():
    assert verdict(Published("t", "wt", 128, "seconds", "5m"), Summary(3.0, None, 1)) == NOT_COMPARED
    assert verdict(ACCURACY, None) == NOT_RUN
