"""Models that users write: shared and scalar parameters, buffers, states that are written to, several dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from combinations import pairwise
from gradguess import online as ol
from online_streams import (
    EXACT,
    RULES,
    assert_same,
    grads,
    loss_fn,
    model,
    online,
    rule_name,
    stream,
    through_the_stream,
)


class Plain(nn.Module):
    """What the models below share; `step` is the recurrence."""

    def __init__(self, step=None, first=None, **parts):
        super().__init__()
        self.mix, self.out, self.step, self.first = nn.Linear(3 + 4, 4), nn.Linear(4, 2), step, first
        for name, part in parts.items():
            setattr(self, name, part)

    def initial_state(self, streams):
        return self.mix.weight.new_zeros(streams, 4).detach() if self.first is None else self.first(streams)

    def forward(self, x, state):
        return self.step(self, x, state)


def plain(m, x, h):
    h = torch.tanh(m.mix(torch.cat([x, h], 1)))
    return m.out(h), h


def one_tensor_for_two(m, x, h):
    h = torch.tanh(m.mix(torch.cat([x, h], 1)) + (m.a + m.b) + h)
    return m.out(h), h


def scalar(m, x, h):
    h = torch.sigmoid(m.s) * h + torch.tanh(m.mix(torch.cat([x, h], 1)))
    return m.out(h), h


def tied(m, x, h):
    h = torch.tanh(m.mix(torch.cat([x, h], 1)))
    return (h @ m.mix.weight[:, :4])[:, :2] + m.out(h) * x[:, :1], h


def rows_alone(m, x, h):
    h = 0.9 * h + torch.tanh(m.out(x[:, 0, None] + m.mix.weight[0, 0] * torch.ones(4).to(x)))[:, 0]
    return torch.stack([h, h * x[:, 1]], 1), h


MODELS = {
    "one tensor for two": lambda: Plain(
        one_tensor_for_two, a=nn.Parameter(torch.randn(4)), b=nn.Parameter(torch.randn(4))
    ),
    "a scalar": lambda: Plain(scalar, s=nn.Parameter(torch.tensor(0.3))),
    "tied": lambda: Plain(tied),
    "a state without columns": lambda: Plain(rows_alone, first=lambda n: torch.zeros(n, dtype=torch.double)),
    "one cell twice": lambda: ol.Recurrent([nn.RNNCell(3, 3)] * 2, nn.Linear(3, 2)),
    "a state across memory": lambda: Plain(
        lambda m, x, h: (plain(m, x, h)[0], plain(m, x, h)[1].T.contiguous().T),
        first=lambda n: torch.zeros(4, n, dtype=torch.double).T,
    ),
}


@pytest.mark.parametrize(("rule", "name", "streams"), pairwise(EXACT, MODELS, [1, 3]))
def test_exact_rules_on_models_of_users(name, rule, streams):
    torch.manual_seed(0)
    network, data = MODELS[name]().double(), stream(5, streams)
    found, expected = online(network, rule, data), through_the_stream(network, data)
    assert_same({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("rule", EXACT, ids=rule_name)
@pytest.mark.parametrize("frozen", ["weight_hh", "bias_ih"])
def test_frozen_parameters_get_no_gradient(rule, frozen):
    network, data = model("gru"), stream(5)
    network.cells[0].get_parameter(frozen).requires_grad_(False)
    found = online(network, rule, data)
    assert f"cells.0.{frozen}" not in found
    assert_same(found, through_the_stream(network, data))


@pytest.mark.parametrize("name", ["weight_hh", "bias_ih"])
def test_parameters_that_are_frozen_or_thawed_on_the_way(name):
    network, data = model("rnn"), stream(3)
    p = network.cells[0].get_parameter(name)
    p.requires_grad_(name == "bias_ih")
    learner = ol.Online(network, ol.RTRL())
    learner(loss_fn, *data[0])
    p.requires_grad_(name == "weight_hh")
    with pytest.raises(gg.InputError, match=rf"cells.0.{name} started or ceased .* make a new Online"):
        learner(loss_fn, *data[1])
    p.requires_grad_(name == "bias_ih")
    network.readout.requires_grad_(False)  # the influence does not need it
    learner(loss_fn, *data[2])


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_are_written_once_for_each_step(rule, in_place):
    def counting(m, x, h):
        if in_place:
            m.count += 1
        else:
            m.count = m.count + 1
        return plain(m, x, h)

    network, data = Plain(counting), stream(4)
    network.register_buffer("count", torch.zeros(()))
    network.double()
    data[2][0][1] = float("nan")  # one stream is skipped
    learner = ol.Online(network, rule)
    for x, target in data:
        learner(loss_fn, x, target)
    assert network.count == 4


@pytest.mark.parametrize("rule", EXACT, ids=rule_name)
def test_a_model_may_write_into_the_state_that_it_is_given(rule):
    def writing(m, x, state):
        state["n"] += 1
        output, h = plain(m, x, state["h"].mul_(0.9))
        return output, {"h": h, "n": state["n"]}

    def calm(m, x, state):
        output, h = plain(m, x, state["h"] * 0.9)
        return output, {"h": h, "n": state["n"] + 1}

    def first(streams):
        return {"h": torch.zeros(streams, 4).double(), "n": torch.zeros(streams, dtype=torch.long)}

    network, data = Plain(writing, first).double(), stream(4)
    network.zero_grad()
    learner = ol.Online(network, rule)
    for x, target in data:
        learner(loss_fn, x, target)
    found = grads(network)
    assert learner.state["n"].tolist() == [4, 4, 4]
    learner.reset([1])
    assert learner.state["n"].tolist() == [4, 0, 4]
    network.step = calm
    assert_same(found, through_the_stream(network, data))


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(rule, dtype):
    network = model("gru").to(dtype)
    learner = ol.Online(network, rule)
    for x, target in stream(5):
        learner(loss_fn, x.to(dtype), target.to(dtype))
    assert all(grad.dtype == dtype for grad in grads(network).values())


def test_truncation_asks_the_model_for_no_step_that_never_was():
    """A row of zeros has no direction."""
    network, data = Plain(lambda m, x, h: plain(m, x / x.norm(dim=1, keepdim=True), h)).double(), stream(4)
    assert_same(online(network, ol.TBPTT(9), data), through_the_stream(network, data))
