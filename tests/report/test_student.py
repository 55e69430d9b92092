"""Student's distribution against SciPy's, and against the printed table."""

from __future__ import annotations

import math

import pytest

from gradguess_lab.tables.student import cdf, quantile

DEGREES = (0.7, 1, 2, 2.5, 3, 9, 17.3, 40, 400, 1e5)


@pytest.mark.parametrize("df", DEGREES)
def test_the_distribution_function_is_scipy_s(df: float):
    stats = pytest.importorskip("scipy.stats")
    for t in (-30.0, -3.0, -1e-3, 0.0, 1e-6, 0.4, 2.0, 6.0, 50.0):
        assert cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("df", DEGREES)
def test_the_quantiles_are_scipy_s(df: float):
    stats = pytest.importorskip("scipy.stats")
    for p in (0.001, 0.025, 0.3, 0.5, 0.9, 0.95, 0.975, 0.9995):
        assert quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


def test_the_edges():
    assert cdf(math.inf, 3) == 1.0
    assert cdf(-math.inf, 3) == 0.0
    assert cdf(1.0, math.inf) == pytest.approx(0.8413447, abs=1e-7)
    assert math.isnan(cdf(math.nan, 3))
    assert math.isnan(quantile(1.0, 3))
    assert math.isnan(quantile(0.5, 0))
