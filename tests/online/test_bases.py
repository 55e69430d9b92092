"""The basis of W⊥ through time: skipped streams, losses that arrive late, seeds, and numbers out of bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess import online as ol
from gradguess.online.basis_rules import BASES
from online_streams import loss_fn, model, stream


def test_random_directions_are_those_of_the_seed_and_stay():
    found = []
    for seed in (0, 0, 1):
        learner = ol.Online(model("rnn"), ol.WPerp(2, "random", refresh=2), seed)
        data = stream(4)
        learner(loss_fn, *data[0])
        V = learner.state_dict()["shared/V"]
        for step in data[1:]:
            learner(loss_fn, *step)
        assert torch.equal(learner.state_dict()["shared/V"], V)
        found.append(V)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("basis", ["observable", "lagged", "krylov", "wperp"])
def test_a_recurrence_that_explodes_has_a_basis(basis):
    J, S = 100 * torch.ones(1, 6, 6) + torch.eye(6), torch.eye(6)
    V = BASES[basis](J, S, 2)
    torch.testing.assert_close(V.T @ V, torch.eye(2))


def test_a_jacobian_that_is_not_finite_is_an_error_that_changes_nothing():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3, 4)

        def initial_state(self, streams):
            return torch.zeros(streams, 4).double()

        def forward(self, x, h):
            return self.mix(x)[:, :2], h.sqrt() + self.mix(x) ** 2

    network = Root().double()
    learner = ol.Online(network, ol.WPerp(2))
    with pytest.raises(gg.NonFiniteError, match="Jacobian of the state at step 0 is NaN or infinite"):
        learner(lambda output, target: ((output - target) ** 2).sum(1), *stream(1)[0])
    assert learner.steps == 0
    assert network.mix.weight.grad is None
