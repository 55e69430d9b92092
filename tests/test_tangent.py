"""The tangent pass against reverse mode: every guess on every model."""

import pytest
import torch

import gradguess as gg
from asserts import assert_jvp_matches_autograd
from frames import slots_of
from models import GUESSES, SITE_GUESSES, ZOO, generator, make


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("name", ZOO)
def test_derivative_is_reverse_modes(name, guess):
    case = make(name)
    state = torch.get_rng_state()
    est = gg.estimate(case.model, GUESSES[guess], *case.args, tangents=2, generator=generator(1))
    assert torch.equal(torch.get_rng_state(), state)  # so that the reference sees the same dropout masks
    assert_jvp_matches_autograd(case, est, slots_of(case))


@pytest.mark.parametrize("name", ["relu-bias", "branching", "transformer", "lstm", "batch-norm", "bare"])
@pytest.mark.parametrize("guess", SITE_GUESSES)
def test_isolated_derivatives_are_tangent_major(name, guess):
    case = make(name)
    est = gg.estimate(case.model, GUESSES[guess], *case.args, tangents=2, isolate=True, generator=generator(1))
    assert_jvp_matches_autograd(case, est, slots_of(case), isolate=True)
