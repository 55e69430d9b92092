"""The rule behind a verdict, at its edges."""

from __future__ import annotations

import math
import statistics

import pytest

from gradguess.experiments.paper_numbers import Published
from gradguess.experiments.tables.compare import DIFFERS, HOLDS, NOT_COMPARED, NOT_RUN, Summary, verdict

ACCURACY = Published("t", "wt", 128, "train_accuracy", "0.312")


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
def test_with_seeds_the_limit_is_two_deviations_of_the_difference_and_the_rounding(side: int):
    limit = 2 * 0.01 * math.sqrt(1 + 1 / 4) + 0.0005
    assert verdict(ACCURACY, Summary(0.312 + side * (limit - 1e-6), 0.01, 4)) == HOLDS
    assert verdict(ACCURACY, Summary(0.312 + side * (limit + 1e-6), 0.01, 4)) == DIFFERS


def test_with_one_seed_the_limit_is_the_stated_tolerance():
    assert verdict(ACCURACY, Summary(0.312 + 0.0304, None, 1)) == HOLDS
    assert verdict(ACCURACY, Summary(0.312 + 0.0306, None, 1)) == DIFFERS


@pytest.mark.parametrize(("ratio", "expected"), [(1.9, HOLDS), (0.51, HOLDS), (2.1, DIFFERS), (0.49, DIFFERS)])
def test_magnitudes_hold_within_a_factor_of_two(ratio: float, expected: str):
    entry = Published("t", "wt", 128, "bias", "2.75e-4", layer=1)
    assert verdict(entry, Summary(ratio * entry.value, 1e-9, 3)) == expected


def test_one_seed_never_excuses_a_magnitude_by_an_absolute_tolerance():
    entry = Published("t", "wt", 128, "bias", "2.75e-4", layer=1)
    assert verdict(entry, Summary(0.01, None, 1)) == DIFFERS


def test_ranks_have_a_tenth_of_the_width():
    entry = Published("t", "wperp", 128, "rank", "64", layer=1)
    assert verdict(entry, Summary(64 + 12.8, 0.0, 3)) == HOLDS
    assert verdict(entry, Summary(64 + 13.5, 0.0, 3)) == DIFFERS


def test_times_are_not_compared_and_missing_runs_are_not_run():
    assert verdict(Published("t", "wt", 128, "seconds", "5m"), Summary(3.0, None, 1)) == NOT_COMPARED
    assert verdict(ACCURACY, None) == NOT_RUN
