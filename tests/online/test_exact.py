"""Exact rules against autograd through the whole stream with frozen weights."""

from __future__ import annotations

import pytest
import torch

from gradguess import online as ol
from online_streams import CELLS, EXACT, assert_same, loss_fn, model, online, stream, through_the_stream

BASES = [ol.WPerp(50, basis, refresh=3) for basis in ("observable", "wperp", "random")]
BLOCKS = [ol.Blockwise(ol.WPerp(50, refresh=steps)) for steps in (1, 9)]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("rule", EXACT + BASES + BLOCKS, ids=str)
def test_exact_rules_are_backpropagation_through_the_stream(name, rule):
    network, data = model(name), stream(8)
    assert_same(online(network, rule, data), through_the_stream(network, data))


def test_an_element_wise_recurrence_keeps_two_numbers_per_parameter():
    network = model("lru")
    learner = ol.Online(network, ol.RTRL())
    x, target = stream(1)[0]
    learner(loss_fn, x, target)
    recurrent = sum(p.numel() for name, p in network.named_parameters() if name.startswith("cells"))
    assert sum(v.numel() for k, v in learner.state_dict().items() if k.startswith("rows/")) == 3 * 2 * recurrent


def test_steps_without_a_loss_carry_the_influence():
    network, data = model("gru"), stream(8)
    sparse = [(x, target if i in (3, 7) else None) for i, (x, target) in enumerate(data)]
    assert_same(online(network, ol.RTRL(), sparse), through_the_stream(network, sparse))


@pytest.mark.parametrize("rule", [ol.RTRL(), ol.Blockwise(ol.WPerp(50, refresh=4))], ids=["rtrl", "blocks"])
def test_a_reset_cuts_the_stream_of_one_row(rule):
    network, data = model("lstm"), stream(6)
    network.zero_grad()
    learner = ol.Online(network, rule)
    for i, (x, target) in enumerate(data):
        if i == 3:
            learner.reset([1])
        learner(loss_fn, x, target)
    found = {name: p.grad.clone() for name, p in network.named_parameters()}
    others = through_the_stream(network, [(x[[0, 2]], t[[0, 2]]) for x, t in data])
    before = through_the_stream(network, [(x[[1]], t[[1]]) for x, t in data[:3]])
    after = through_the_stream(network, [(x[[1]], t[[1]]) for x, t in data[3:]])
    assert_same(found, {name: (2 * others[name] + before[name] + after[name]) / 3 for name in found})


def test_a_loss_that_arrives_later_has_the_influence_of_its_own_step():
    network, data = model("rnn"), stream(6)
    expected = through_the_stream(network, [(x, t if i == 2 else None) for i, (x, t) in enumerate(data)])
    network.zero_grad()
    learner, held = ol.Online(network, ol.RTRL()), None
    for i, (x, _) in enumerate(data):
        learner(None, x)
        if i == 2:
            held = learner.later()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(1.0)  # the weights of its own step count
    held(loss_fn, data[2][1])
    assert_same({name: p.grad for name, p in network.named_parameters()}, expected)


def test_a_loss_that_arrives_later_has_weights_input_and_draws_of_its_own_step():
    torch.manual_seed(0)
    network = ol.Recurrent(torch.nn.RNNCell(3, 5), torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(5, 2)))
    network.double()
    x, target = stream(1)[0]
    torch.manual_seed(1)
    expected = through_the_stream(network, [(x, target)])
    network.zero_grad()
    learner, given = ol.Online(network, ol.OneStep()), x.clone()
    learner(None, given * 0)
    learner.reset()
    torch.manual_seed(1)
    learner(None, given)
    with torch.no_grad():
        given.zero_()
        for p in network.parameters():
            p.add_(1.0)
    held = learner.later()
    torch.testing.assert_close(held.output.detach(), learner.output)
    held(loss_fn, target)
    assert_same({name: p.grad for name, p in network.named_parameters()}, expected)
    held(loss_fn, target)  # a loss in two parts
    assert_same({name: p.grad / 2 for name, p in network.named_parameters()}, expected)
