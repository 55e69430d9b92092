"""What the explorable page says under "Things to try" is so."""

from __future__ import annotations

import pytest

from explore.controls import cells, choose, value

pytestmark = pytest.mark.slow


def test_activation_perturbation_has_no_bias_and_noise_that_grows_with_the_width(visit):
    tab, _ = visit()
    choose(tab, method="activation", width=8)
    narrow = value(tab, "noise over signal")
    choose(tab, width=48)
    assert value(tab, "bias") == 0
    assert value(tab, "noise over signal") > 1.5 * narrow


def test_k_trades_bias_for_variance(visit):
    tab, _ = visit()
    seen = []
    for k in (1, 3, 6, 10):
        choose(tab, k=k)
        seen.append((value(tab, "bias"), value(tab, "variance")))
    assert [bias for bias, _ in seen] == sorted((bias for bias, _ in seen), reverse=True)
    assert [variance for _, variance in seen] == sorted(variance for _, variance in seen)


def test_the_noise_of_w_perp_hardly_depends_on_the_width(visit):
    tab, _ = visit()
    noise = []
    for width in (16, 24, 32, 40, 48):
        choose(tab, width=width)
        noise.append(value(tab, "noise over signal"))
    assert max(noise) < 1.6 * min(noise)


def test_the_mean_of_w_t_misses_the_gradient(visit):
    tab, _ = visit()
    choose(tab, method="wt")
    assert value(tab, "bias") > 0.1 * value(tab, "true gradient")


def test_training_draws_the_gradient_into_few_directions(visit):
    tab, _ = visit()
    choose(tab, width=48)
    late = value(tab, "bias") / value(tab, "true gradient")
    choose(tab, trained=0)
    assert value(tab, "bias") / value(tab, "true gradient") > 1.5 * late


def test_as_many_tangents_as_k_measure_the_whole_guessing_space(visit):
    tab, _ = visit()
    choose(tab, k=3, tangents=3, others=False)
    assert value(tab, "variance") == 0
    assert value(tab, "bias") > 0


def test_w_p_is_activation_perturbation_below_and_w_perp_above(visit):
    tab, _ = visit()
    rows = ("bias", "variance", "cosine of the mean")
    choose(tab, method="activation")
    below = [cells(tab, row)[0] for row in rows]
    choose(tab, method="wp")
    assert [cells(tab, row)[0] for row in rows] == below
    choose(tab, layer=1, others=False)
    above = [cells(tab, row)[0] for row in rows]
    choose(tab, method="wperp", k=3)
    assert [cells(tab, row)[0] for row in rows] == above
