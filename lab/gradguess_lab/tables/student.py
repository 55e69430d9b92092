"""Student's t distribution: its distribution function and its quantiles, for any number of degrees of freedom.

Written out here so that results can be judged without SciPy; the tests hold it against SciPy's.
"""

from __future__ import annotations

import math
from functools import cache

_STEPS = 400  # of the continued fraction; it converges in about sqrt(df) of them
_TINY = 1e-300


def cdf(t: float, df: float) -> float:
    """The probability of a value of at most `t`.

    >>> cdf(0.0, 5), round(cdf(2.0, 2), 4)
    (0.5, 0.9082)
    """
    if math.isnan(t) or not df > 0:
        return math.nan
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    if math.isinf(df):
        return 0.5 * math.erfc(-t / math.sqrt(2))
    tail = 0.5 * _incomplete_beta(df / 2, df / (df + t * t), t * t / (df + t * t))
    return 1 - tail if t > 0 else tail


@cache
def quantile(p: float, df: float) -> float:
    """The value below which a share `p` of the distribution lies, by bisection.

    >>> round(quantile(0.975, 9), 4), round(quantile(0.975, 2), 4)
    (2.2622, 4.3027)
    """
    if not (0 < p < 1 and df > 0):
        return math.nan
    if p < 0.5:
        return -quantile(1 - p, df)
    low, high = 0.0, 1.0
    while cdf(high, df) < p:
        low, high = high, 2 * high
    while (middle := 0.5 * (low + high)) not in (low, high):
        low, high = (middle, high) if cdf(middle, df) < p else (low, middle)
    return high


def _incomplete_beta(a: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function `I_x(a, 1/2)`; `rest` is `1 - x`, given apart to keep its digits."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    scale = math.lgamma(a + 0.5) - math.lgamma(a) - math.lgamma(0.5) + a * math.log(x) + 0.5 * math.log(rest)
    if x < (a + 1) / (a + 2.5):
        return math.exp(scale) * _fraction(a, 0.5, x) / a
    return 1 - math.exp(scale) * _fraction(0.5, a, rest) / 0.5


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
