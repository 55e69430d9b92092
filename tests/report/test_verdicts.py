"""The rule behind a verdict and Welch's tests, against SciPy's, against chance, and at their edges."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from gradguess_lab.paper_numbers import Published
from gradguess_lab.tables.verdicts import (
    DIFFERS,
    HOLDS,
    SINGLE,
    UNCLEAR,
    ZERO,
    Estimate,
    Summary,
    difference,
    rounding_floor,
    slope,
    verdict,
)

ACCURACY = Published("t", "wt", 128, "train_accuracy", "0.312")
KNOWN = Summary(0.0, 0.0, 2)  # a number without spread
A = [0.30, 0.31, 0.335, 0.29, 0.305]
B = [0.33, 0.32, 0.35, 0.325]


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(("n", "t"), [(2, 12.7062047), (3, 4.3026527), (10, 2.2621572)])
def test_the_limit_is_student_s_prediction_interval_and_the_rounding(side: int, n: int, t: float):
    limit = t * 0.01 * math.sqrt(1 + 1 / n) + 0.0005
    assert verdict(ACCURACY, Summary(0.312 + side * (limit - 1e-6), 0.01, n)) == HOLDS
    assert verdict(ACCURACY, Summary(0.312 + side * (limit + 1e-6), 0.01, n)) == DIFFERS


def test_zero_to_rounding_needs_both_below_the_floor():
    entry = Published("t", "wp", 256, "bias", "1.35e-8", layer=1)
    floor = rounding_floor(256, 0.03, 512)
    assert verdict(entry, Summary(0.0, 0.0, 10), floor) == ZERO
    assert verdict(entry, Summary(2 * floor, 0.0, 10), floor) == DIFFERS
    assert verdict(entry, Summary(0.0, 0.0, 10), 1e-8) == DIFFERS
    assert verdict(entry, Summary(0.0, 0.0, 10)) == DIFFERS


def test_the_difference_is_scipy_s():
    found, twin = difference(Summary.of(A), Summary.of(B)), stats.ttest_ind(B, A, equal_var=False)
    assert found.df == pytest.approx(twin.df)
    for level in (0.9, 0.95):
        assert found.interval(level) == pytest.approx(tuple(twin.confidence_interval(level)))


@pytest.mark.parametrize(
    ("value", "bound", "expected"),
    [(1.9, 0.0, HOLDS), (1.7, 0.0, UNCLEAR), (-1.9, 0.0, DIFFERS), (1.9, 0.5, UNCLEAR)],  # t(.95, 10) = 1.812
)
def test_one_sided_verdicts(value: float, bound: float, expected: str):
    assert Estimate(value, 1.0, 10).exceeds(bound) == expected


@pytest.mark.parametrize(
    ("value", "margin", "expected"),
    [
        (0.0, 1.9, HOLDS),
        (0.0, 1.7, UNCLEAR),  # not shown to be within the margin
        (2.3, 100.0, DIFFERS),  # t(.975, 10) = 2.228: a margin excuses no difference
        (2.1, 100.0, HOLDS),
    ],
)
def test_the_same_needs_no_rejection_and_the_margin(value: float, margin: float, expected: str):
    assert Estimate(value, 1.0, 10).is_zero(margin) == expected


@pytest.mark.parametrize(("value", "expected"), [(3.0, HOLDS), (3.5, UNCLEAR), (7.0, DIFFERS), (-7.0, DIFFERS)])
def test_small_is_within_the_margin_whatever_zero_is(value: float, expected: str):
    assert Estimate(value, 1.0, 10).is_small(5.0) == expected


def test_no_spread_is_taken_at_its_word():
    same = difference(Summary(1.0, 0.0, 3), Summary(1.0, 0.0, 3))
    assert (same.exceeds(), same.is_zero(0.1)) == (UNCLEAR, HOLDS)
    assert difference(Summary(1.0, 0.0, 3), Summary(1.1, 0.0, 3)).exceeds() == HOLDS
    assert difference(Summary(0.999, 0.0, 2), Summary(1.0, 0.0, 3)).exceeds() == HOLDS
    assert slope([(x, 0.5) for x in (1, 1, 2, 2)]).exceeds(0.5) == DIFFERS


def test_a_single_run_is_not_judged_and_a_diverged_one_differs():
    one, several, diverged = Summary.of([1.0]), Summary(1.0, 0.1, 3), Summary.of([0.3, math.nan])
    assert verdict(ACCURACY, one) == difference(one, several).exceeds() == difference(KNOWN, one).exceeds() == SINGLE
    assert difference(several, one).is_zero(9.0) == SINGLE
    assert (
        verdict(ACCURACY, diverged)
        == difference(diverged, several).exceeds()
        == difference(KNOWN, diverged).exceeds()
        == DIFFERS
    )
