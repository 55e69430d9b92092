"""Welch's tests against SciPy's, and the verdicts at their edges."""

from __future__ import annotations

import math

import pytest

from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.welch import Estimate, difference, mean_of, slope

A = [0.30, 0.31, 0.335, 0.29, 0.305]
B = [0.33, 0.32, 0.35, 0.325]


def test_the_difference_is_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    found, twin = difference(Summary.of(A), Summary.of(B)), stats.ttest_ind(B, A, equal_var=False)
    assert found.df == pytest.approx(twin.df)
    assert found.chance_below(0.0) == pytest.approx(
        stats.ttest_ind(B, A, equal_var=False, alternative="greater").pvalue
    )
    assert found.interval() == pytest.approx(tuple(twin.confidence_interval()))


def test_the_slope_is_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    x, y = [6, 6, 7, 7, 8, 9], [0.1, 0.12, 0.2, 0.15, 0.3, 0.31]
    found, twin = slope(list(zip(x, y, strict=True))), stats.linregress(x, y)
    assert (found.value, found.error) == pytest.approx((twin.slope, twin.stderr))
    assert 2 * found.chance_below(0.0) == pytest.approx(twin.pvalue)


def test_one_sided_verdicts():
    assert Estimate(1.9, 1.0, 10).exceeds() == "holds"  # t(.95, 10) = 1.812
    assert Estimate(1.7, 1.0, 10).exceeds() == "unclear"
    assert Estimate(-1.9, 1.0, 10).exceeds() == "differs"
    assert Estimate(1.9, 1.0, 10).exceeds(0.5) == "unclear"


def test_the_same_needs_no_rejection_and_the_margin():
    assert Estimate(0.0, 1.0, 10).is_zero(1.9) == "holds"
    assert Estimate(0.0, 1.0, 10).is_zero(1.7) == "unclear"  # not shown to be within the margin
    assert Estimate(2.3, 1.0, 10).is_zero(100.0) == "differs"  # t(.975, 10) = 2.228: a margin excuses no difference
    assert Estimate(2.1, 1.0, 10).is_zero(100.0) == "holds"


def test_small_is_within_the_margin_whatever_zero_is():
    assert Estimate(3.0, 1.0, 10).is_small(5.0) == "holds"
    assert Estimate(3.5, 1.0, 10).is_small(5.0) == "unclear"
    assert Estimate(7.0, 1.0, 10).is_small(5.0) == "differs"
    assert Estimate(-7.0, 1.0, 10).is_small(5.0) == "differs"


def test_no_spread_is_taken_at_its_word():
    same = difference(Summary(1.0, 0.0, 3), Summary(1.0, 0.0, 3))
    assert (same.exceeds(), same.is_zero(0.1)) == ("unclear", "holds")
    assert difference(Summary(1.0, 0.0, 3), Summary(1.1, 0.0, 3)).exceeds() == "holds"
    assert mean_of(Summary(1.0, 0.0, 3)).exceeds(0.999) == "holds"


def test_a_single_run_has_no_difference_and_a_diverged_one_differs():
    assert difference(Summary(1.0, None, 1), Summary(1.0, 0.1, 3)) is None
    assert mean_of(Summary(1.0, None, 1)) is None
    assert difference(Summary(math.nan, None, 2), Summary(1.0, 0.1, 3)).exceeds() == "differs"
    assert mean_of(Summary(math.nan, None, 2)).exceeds() == "differs"
