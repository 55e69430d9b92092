"""The pattern of traces, and what is cut from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess import online as ol
from online_streams import assert_same, grads, loss_fn, model, online, stream, through_the_stream


class Words(nn.Module):
    """An embedding before a cell."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rest = nn.Embedding(9, 3), ol.Recurrent(nn.RNNCell(3, 4), nn.Linear(4, 2))

    def initial_state(self, streams):
        return self.rest.initial_state(streams)

    def forward(self, x, state):
        return self.rest(self.embedding(x), state)


def words(steps):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randint(9, (3,), generator=generator), target) for _, target in stream(steps)]


def test_a_word_that_was_not_there_at_the_first_step_gets_credit():
    torch.manual_seed(0)
    network, data = Words().double(), words(8)
    assert_same(online(network, ol.SnAp(3), data), through_the_stream(network, data))


@pytest.mark.parametrize("streams", [1, 3])
def test_a_unit_that_is_off_at_the_first_step_gets_credit(streams):
    network, data = model("relu"), stream(6, streams)
    with torch.no_grad():
        network.cells[0].bias_ih[:2] -= 2
    assert_same(online(network, ol.SnAp(2), data), through_the_stream(network, data))
    learner = ol.Online(network, ol.SnAp(1))
    learner(loss_fn, *data[0])
    assert learner.state_dict()["shared/slots/cells.0.weight_hh"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_weights_that_start_at_zero_get_credit_later():
    network, data = model("rnn"), stream(6)
    weights = network.cells[0].weight_hh.detach().clone()
    nn.init.zeros_(network.cells[0].weight_hh)
    network.zero_grad()
    learner = ol.Online(network, ol.SnAp(2))
    learner(loss_fn, *data[0])
    with torch.no_grad():
        network.cells[0].weight_hh.copy_(weights)
    learner.reset()
    network.zero_grad()
    for step in data[1:]:
        learner(loss_fn, *step)
    assert_same(grads(network), through_the_stream(network, data[1:]))


class Leaky(nn.Module):
    """A leaky unit; `how` says in which words its products are written."""

    def __init__(self, how):
        super().__init__()
        self.W, self.U = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4, 3))
        self.how, self.out = how, nn.Linear(4, 2)

    def initial_state(self, streams):
        return self.W.new_zeros(streams, 4).detach()

    def forward(self, x, h):
        h = 0.7 * h + 0.3 * torch.tanh(self.how(self.W, h) + self.how(self.U, x))
        return self.out(h), h


PRODUCTS = {
    "weights first": lambda W, h: (W @ h.T).T,
    "linear": lambda W, h: nn.functional.linear(input=h, weight=W),
    "einsum": lambda W, h: torch.einsum("ij,bj->bi", W, h),
    "addmm": lambda W, h: torch.addmm(torch.zeros(4).to(h), h, W.T),
    "method": lambda W, h: h.mm(W.t()),
    "a column": lambda W, h: (W @ h.unsqueeze(-1)).squeeze(-1),
    "vecdot": lambda W, h: torch.linalg.vecdot(h[:, None], W),
    "multiplied and summed": lambda W, h: (h[:, None] * W).sum(-1),
    "weights first, summed": lambda W, h: torch.sum(W.mul(h[:, None]), dim=2),
    "a mean": lambda W, h: torch.mean(h[:, None] * W, -1) * W.shape[1],
    "a state that is repeated": lambda W, h: (h[:, None].expand(-1, len(W), -1) * W).sum(-1),
    "turned on the way": lambda W, h: (h[:, None] * W + 1).mT.sum(-2) - W.shape[1],
    "row by row": lambda W, h: torch.stack([(h * row).sum(-1) for row in W], -1),
    "sample by sample": lambda W, h: torch.stack([(row * W).sum(-1) for row in h]),
    "in place": lambda W, h: torch.ones_like(W).mul(h[:, None]).mul_(W).add_(1).sum(-1) - W.shape[1],
    "divided": lambda W, h: (h[:, None] / W.reciprocal()).sum(-1),
    "summed by einsum": lambda W, h: torch.einsum("bij->bi", h[:, None] * W),
    "einsum without a sum": lambda W, h: torch.einsum("bj,ij->bij", h, W).sum(-1),
    "the last of running sums": lambda W, h: (h[:, None] * W).cumsum(-1)[..., -1],
    "a table that is filled": lambda W, h: filled(torch.zeros(1, *W.shape).to(h), h[:, None] * W).sum(-1),
}


def filled(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    table = table + 0 * values
    table[:, :] = values
    return table


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rule", [ol.EProp(), ol.RFLO(0.7)], ids=str)
def test_products_are_cut_however_they_are_written(name, rule):
    torch.manual_seed(0)
    network, plain, data = Leaky(PRODUCTS[name]).double(), Leaky(lambda W, h: h @ W.T).double(), stream(5)
    plain.load_state_dict(network.state_dict())
    assert_same(online(network, rule, data), online(plain, rule, data))


def test_eprop_carries_the_leak():
    """`T = 0.7 T + F` with the exact error at the state before the step."""
    torch.manual_seed(0)
    network, data = Leaky(lambda W, h: h @ W.T).double(), stream(5)
    found = online(network, ol.EProp(), data)
    network.zero_grad()
    h, T = network.initial_state(3), {"W": 0.0, "U": 0.0}
    for x, target in data:
        leaf = h.detach().requires_grad_()
        output, h = network(x, leaf)
        loss_fn(output, target).mean().backward()
        gate = 0.3 * (1 - ((h - 0.7 * leaf) / 0.3) ** 2).detach()
        for name, seen in (("W", leaf.detach()), ("U", x)):
            network.get_parameter(name).grad += (leaf.grad[:, :, None] * T[name]).sum(0)
            T[name] = 0.7 * T[name] + gate[:, :, None] * seen[:, None, :]
    assert_same(found, grads(network))


class OwnLeak(Leaky):
    """With a leak that is learned, and that `times` multiplies by."""

    def __init__(self, times):
        super().__init__(lambda W, h: (h[:, None] * W).sum(-1))
        self.times = times
        self.leak = nn.Parameter(torch.full((4,), 0.7, dtype=torch.float64))

    def forward(self, x, h):
        h = self.times(self.leak, h) + (1 - self.leak) * torch.tanh(self.how(self.W, h) + self.how(self.U, x))
        return self.out(h), h


TIMES = [torch.mul, lambda leak, h: torch.einsum("i,bi->bi", leak, h), lambda leak, h: h.clone().mul_(leak)]


@pytest.mark.parametrize("times", TIMES, ids=["mul", "einsum", "in place"])
def test_what_multiplies_each_unit_by_itself_is_no_product(times):
    torch.manual_seed(0)
    network, plain, data = OwnLeak(times).double(), Leaky(lambda W, h: h @ W.T).double(), stream(5)
    plain.load_state_dict(network.state_dict(), strict=False)
    learner = ol.Online(network, ol.EProp())
    for step in data:
        learner(loss_fn, *step)
    found = grads(network)
    assert found.pop("leak").abs().min() > 0
    assert_same(found, online(plain, ol.EProp(), data))
    shapes = {name: slots.shape for name, slots in learner.state_dict().items() if name.startswith("shared/slots")}
    assert set(shapes.values()) == {(4, 1)}


def test_a_fused_cell_hides_its_products():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 4), nn.Linear(4, 2)

        def forward(self, x, h=None):
            h = self.cell(x, h)
            return self.out(h), h

    class Attends(Fused):
        """Python code, whose products are not seen either."""

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.initial_state = lambda streams: torch.zeros(streams, 5, 4).double()

        def forward(self, x, h=None):
            h = self.attention(h, h, h, need_weights=False)[0]
            return self.out(h.mean(1)), h

    with pytest.raises(gg.InputError, match="multi_head_attention_forward hides its products"):
        online(Attends().double(), ol.EProp(), stream(1))
    network, data = Fused().double(), stream(1)
    online(network, ol.SnAp(1), data)
    with pytest.raises(gg.InputError, match=r"gru_cell hides its products .* gg.online.Recurrent"):
        online(network, ol.EProp(), data)
