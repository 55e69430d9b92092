"""The basis of W⊥ through time: skipped streams, losses that arrive late, seeds, and numbers out of bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess import online as ol
from gradguess.online.bases import BASES
from online_streams import loss_fn, model, stream


def test_a_new_basis_reaches_the_streams_that_are_skipped():
    learner, data = ol.Online(model("rnn"), ol.WPerp(3, "wperp", refresh=2)), stream(3)
    for step in data[:2]:
        learner(loss_fn, *step)
    before = learner.state_dict()
    data[2][0][1] = float("nan")
    learner(loss_fn, *data[2])
    after = learner.state_dict()
    V, new = before["shared/V"], after["shared/V"]
    assert not torch.allclose(V, new)
    for name in before:
        if name.startswith("rows/"):
            torch.testing.assert_close(after[name][1], new.T @ V @ before[name][1])


def test_losses_that_arrive_late_say_where_errors_point():
    late, prompt = (ol.Online(model("rnn"), ol.WPerp(2, refresh=100)) for _ in range(2))
    for x, target in stream(4):
        prompt(loss_fn, x, target)
        late(None, x)
        late.later()(loss_fn, target)
    torch.testing.assert_close(late.state_dict()["shared/S"], prompt.state_dict()["shared/S"])


def test_before_the_first_error_all_errors_count_alike():
    learner, data = ol.Online(model("rnn"), ol.WPerp(2, "lagged")), stream(1)
    learner(None, data[0][0])
    network, h = model("rnn"), torch.zeros(3, 5).double()
    J = torch.autograd.functional.jacobian(lambda h: network(data[0][0], h)[1].sum(0), h).transpose(0, 1)
    V, expected = learner.state_dict()["shared/V"], BASES["lagged"](J, torch.eye(5).double(), 2)
    torch.testing.assert_close(V @ V.T, expected @ expected.T)


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
