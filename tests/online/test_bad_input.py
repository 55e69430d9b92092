"""Mistakes of the user, gaps in the stream, and streams that are stopped and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess import online as ol
from online_streams import RULES, assert_same, grads, loss_fn, model, online, rule_name, stream

EXACT = [ol.RTRL(), ol.Blockwise(ol.WPerp(50, refresh=2))]


class Shaky(nn.Module):
    """A module with a mistake that `wrong` names."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.cell, self.calls = wrong, nn.Linear(3 + 4, 4), 0

    def forward(self, x, state=None):
        self.calls += 1
        h = x.new_zeros(len(x), 4) if state is None else state
        if self.wrong == "ignores":
            h = h.detach()
        h = torch.tanh(self.cell(torch.cat([x, h], 1)))
        if self.wrong == "dropout":
            h = nn.functional.dropout(h)
        if self.wrong == "output":
            return h
        if self.wrong == "grows" and self.calls > 4:
            return h, torch.cat([h, h], 1)
        if self.wrong == "dtype" and self.calls > 4:
            return h, h.float()
        if self.wrong == "branch" and h.sum() > 0:
            h = h * 2
        if self.wrong == "tree" and self.calls > 4:
            return h, (h, h)
        return h, h


def first_two(output, target):
    return ((output[:, :2] - target) ** 2).mean(1)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("ignores", gg.InputError, "does not depend on the state"),
        (
            "grows",
            gg.InputError,
            r"changed its shape or dtype: expected \[\(\(3, 4\), torch.float64\)\], found \[\(\(3, 8\)",
        ),
        ("tree", gg.InputError, "changed its shape or dtype"),
        ("dtype", gg.InputError, "changed its shape or dtype"),
        ("output", gg.InputError, r"must return \(output, state\), found Tensor"),
        ("dropout", gg.InputError, "draws random numbers"),
        ("branch", gg.ForwardModeError, "cannot be vectorised over streams"),
    ],
)
def test_a_model_with_a_mistake(wrong, error, words):
    network = Shaky(wrong).double()
    learner = ol.Online(network, ol.RTRL())
    before = at = {}

    def steps():
        nonlocal before, at
        for x, target in stream(6):
            before, at = grads(network), learner.state_dict()
            learner(first_two, x, target)

    with pytest.raises(error, match=words):
        steps()
    after = learner.state_dict()
    assert_same(grads(network), before)
    assert learner.steps == int(at["steps"])
    if "now/h" in at:
        assert all(torch.equal(after[key], value) for key, value in at.items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ol.Online(nn.Linear, ol.RTRL()), "model: expected a torch.nn.Module"),
        (lambda: ol.Online(model("rnn"), ol.RTRL), "with parentheses"),
        (lambda: ol.Online(nn.Tanh(), ol.RTRL()), "nothing to train"),
        (lambda: ol.WPerp(0), "k: expected a whole number"),
        (lambda: ol.WPerp(4, "best"), "basis: expected .* or 'random', found 'best'"),
        (lambda: ol.TBPTT(0), "steps: expected"),
        (lambda: ol.SnAp(0), "order: expected"),
        (lambda: ol.Completed(16), "expected a WPerp and a SnAp.* found int and SnAp"),
        (lambda: ol.Completed(ol.SnAp(), ol.WPerp()), "found SnAp and WPerp"),
        (lambda: ol.Blockwise(16), "Blockwise: expected a WPerp.* found int"),
        (lambda: ol.RFLO(1.5), "decay: expected"),
        (lambda: ol.Recurrent(nn.Linear(2, 2)), "cell: expected nn.RNNCell"),
        (lambda: ol.Recurrent([]), "at least one cell"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(gg.InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("x", "target", "loss", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 2), loss_fn, "expected 3 streams, as before, found 2"),
        ({}, None, loss_fn, "x: expected tensors with one row per stream"),
        (torch.zeros(3, 3), torch.zeros(3, 2), None, "found None beside a target"),
        (torch.zeros(3, 3), torch.zeros(3, 2), lambda o, t: ((o - t) ** 2).mean(), "found a scalar"),
        (
            torch.zeros(3, 3),
            torch.zeros(3, 2),
            lambda o, t: ((o - t) ** 2).sum(1)[:1],
            "returned 1 losses: expected one loss per sample",
        ),
        (torch.zeros(3, 3), torch.zeros(3, 2), lambda o, t: (t**2).sum(1), "the loss depends neither"),
    ],
)
def test_a_wrong_step_loses_nothing(x, target, loss, words):
    network, data = model("gru"), stream(6)
    learner = ol.Online(network, ol.WPerp(2, refresh=2))
    for i, step in enumerate(data):
        if i == 3:
            to_double = {torch.Tensor: lambda t: t.double()}.get(type(x), lambda t: t)
            with pytest.raises(gg.InputError, match=words):
                learner(loss, to_double(x), target)
        learner(loss_fn, *step)
    assert_same(grads(network), online(network, ol.WPerp(2, refresh=2), data))


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_a_row_with_nan_is_skipped_and_the_others_learn(rule):
    network, data = model("rnn"), stream(5)
    gap = [(x.clone(), target) for x, target in data]
    gap[2][0][1] = float("nan")
    network.zero_grad()
    learner = ol.Online(network, rule)
    for step in gap:
        learner(loss_fn, *step)
    assert learner.skipped == 1
    assert all(torch.isfinite(g).all() for g in grads(network).values())
    assert torch.isfinite(learner.state).all()
    if isinstance(rule, ol.RTRL | ol.TBPTT | ol.SnAp):  # the stream goes on as if the step had not been
        seen = ol.Online(model("rnn"), rule)
        for i, (x, target) in enumerate(data):
            if i != 2:
                seen(loss_fn, x, target)
        torch.testing.assert_close(learner.state[1], seen.state[1])


@pytest.mark.parametrize("rule", EXACT, ids=rule_name)
def test_the_gradient_of_a_stream_with_gaps_is_that_of_each_stream_without_them(rule):
    network, data = model("gru"), stream(7)
    gap = [(x.clone(), t.clone()) for x, t in data]
    gap[2][0][1] = float("nan")  # the step is skipped
    gap[3][1][0] = float("nan")  # the loss alone is
    found = online(network, rule, gap)
    weights = [[1 / 3] * 3] * 2 + [[1 / 2, 0, 1 / 2], [0, 1 / 2, 1 / 2]] + [[1 / 3] * 3] * 3
    network.zero_grad()
    for b in range(3):
        state, total = network.initial_state(1), torch.zeros(()).double()
        for i, (x, target) in enumerate(data):
            if (i, b) == (2, 1):
                continue
            output, state = network(x[[b]], state)
            total = total + weights[i][b] * loss_fn(output, target[[b]]).sum()
        total.backward()
    assert_same(found, grads(network))


def test_an_influence_beyond_all_bounds_is_an_error():
    network, data = model("rnn"), stream(2)
    learner = ol.Online(network, ol.RTRL())
    learner(loss_fn, *data[0])
    state = learner.state_dict()
    state["rows/P/cells.0.weight_hh"] += float("inf")
    learner.load_state_dict(state)
    before = grads(network)
    with pytest.raises(gg.NonFiniteError, match="Nothing was changed"):
        learner(loss_fn, *data[1])
    assert_same(grads(network), before)
    assert learner.steps == 1
    learner.reset()
    learner(loss_fn, *data[1])


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
@pytest.mark.parametrize("name", ["lstm", "own"])
def test_a_stream_goes_on_bit_for_bit(rule, name):
    data = stream(9)

    def steps(learner, optimiser, part):
        for x, target in part:
            optimiser.zero_grad()
            learner(loss_fn, x, target)
            optimiser.step()

    network = model(name)
    learner, optimiser = ol.Online(network, rule, seed=4), torch.optim.SGD(network.parameters(), 0.05)
    steps(learner, optimiser, data[:5])
    weights, saved = {k: v.clone() for k, v in network.state_dict().items()}, learner.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    steps(learner, optimiser, data[5:])

    again = model(name, seed=9)
    again.load_state_dict(weights)
    resumed = ol.Online(again, rule)
    resumed.load_state_dict(saved)
    resumed.reset([])
    steps(resumed, torch.optim.SGD(again.parameters(), 0.05), data[5:])
    for key, value in learner.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key
    for key, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_a_state_of_another_rule():
    data = stream(2)
    learner = ol.Online(model("rnn"), ol.WPerp(2))
    learner(loss_fn, *data[0])
    for rule in (ol.WPerp(3), ol.RTRL(), ol.TBPTT(4)):
        other = ol.Online(model("rnn"), rule)
        other.load_state_dict(learner.state_dict())
        with pytest.raises(gg.InputError, match="was saved with another rule or model"):
            other(loss_fn, *data[1])


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_memory_does_not_grow_and_global_random_numbers_are_left_alone(rule):
    learner, sizes, before = ol.Online(model("gru"), rule), set(), torch.get_rng_state()
    for step in stream(8):
        learner(loss_fn, *step)
        sizes.add(learner.kept_bytes)
    assert len(sizes) == 1
    assert torch.equal(torch.get_rng_state(), before)
