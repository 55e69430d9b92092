"""The shipped coefficient sets: the errors that they reach, on numbers and on matrices."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from gradguess.linalg.step_polynomials import SETS, CoefficientSet, placed, polynomial
from matrices import noise

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fit_newton_schulz.py"
script = runpy.run_path(str(SCRIPT))
evaluate = script["evaluate"]

EACH = pytest.mark.parametrize("entry", SETS, ids=lambda entry: f"{entry.sigma:.1f}")

# The largest error allowed off the transition, for each σ. Small σ cap the slope of p, large ones do not.
BOUND = {0.1: 0.2, 0.2: 0.18, 0.3: 0.1, 0.4: 0.03, 0.5: 2e-3, 0.6: 2e-3, 0.7: 6e-3, 0.8: 1e-2, 0.9: 2e-2}


def five_steps(entry: CoefficientSet, x: np.ndarray) -> np.ndarray:
    """Twin of `evaluate`: numpy's polynomial with its even powers written out."""
    a0, a1, a2, a3 = entry.coefficients
    p = np.polynomial.Polynomial([0, a0, 0, a1, 0, a2, 0, a3])
    return p(p(p(p(p(x)))))


@EACH
def test_errors_are_what_one_measures_and_stay_under_the_stated_bounds(entry: CoefficientSet) -> None:
    x = np.linspace(0, 1.1, 11001)
    y = five_steps(entry, x)
    step = x > entry.sigma + 1e-9
    below, above = x < entry.sigma - 0.04995, (x > entry.sigma + 0.04995) & (x < 1.00005)
    measured = (
        np.abs(y[below]).max(),
        np.abs(y[above] - 1).max(),
        np.sqrt(np.mean((y - step)[x < 1.00005] ** 2)),
        np.abs(y[x > 0.99995] - 1).max(),
    )
    assert measured == pytest.approx(tuple(script["errors"](entry).values()), abs=1e-6)
    low, high, rms, overshoot = measured
    assert max(low, high) <= BOUND[entry.sigma]
    assert rms <= 0.11
    assert overshoot <= 0.08


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.25, 0.41, 0.5, 0.68, 0.95, 1.0])
def test_placed_puts_the_step_at_sigma_and_never_enlarges(sigma: float) -> None:
    entry, factor = placed(sigma)
    assert 0 < factor <= 1
    if sigma >= SETS[0].crossing:
        assert factor * sigma == pytest.approx(entry.crossing, abs=1e-12)
        assert evaluate(factor * sigma, entry.coefficients) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("ratio", [0.45, 0.55, 0.63, 0.86])
def test_placed_keeps_exactly_the_directions_above_the_step(ratio: float) -> None:
    """Singular values 1, ..., ratio | ratio - 0.06, ...: the step halfway in the gap keeps exactly the first five."""
    kept, dropped = np.linspace(1, ratio, 5), np.linspace(ratio - 0.06, 0, 20)
    entry, factor = placed(ratio - 0.03)
    assert evaluate(factor * kept, entry.coefficients) == pytest.approx(1, abs=0.15)
    assert evaluate(factor * dropped, entry.coefficients) == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_polynomial_is_that_of_the_eigenvalues(count: int) -> None:
    a = (0.3, 1.1, -0.7, 0.2)[:count]
    G = noise(3, 5, 5)
    G = G @ G.mT / 5
    values, Z = torch.linalg.eigh(G)
    expected = Z @ torch.diag_embed(sum(c * values**j for j, c in enumerate(a))) @ Z.mT
    torch.testing.assert_close(polynomial(G, a), expected, rtol=0, atol=1e-9)
