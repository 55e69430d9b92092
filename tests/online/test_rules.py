"""Each rule against its definition, with dense matrices; UORO in the mean."""

from __future__ import annotations

import pytest
import torch

from gradguess import online as ol
from gradguess.online.basis_rules import BASES
from online_streams import (
    assert_same,
    grads,
    loss_fn,
    model,
    one_step_jacobians,
    online,
    stream,
    with_influence,
)


@pytest.mark.parametrize("name", ["rnn", "gru"])
def test_snap_keeps_the_influence_on_the_own_unit(name):
    network, data = model(name), stream(6)
    n = network.cells[0].hidden_size

    def carry(parameter, J, P, F):
        rows = torch.arange(F.shape[1]) // (F.shape[1] // network.get_parameter(parameter).shape[0])
        mask = (torch.arange(n)[:, None] == rows % n).to(F)
        return mask * (J @ P + F)

    assert_same(online(network, ol.SnAp(1), data), with_influence(network, data, carry))


def test_eprop_keeps_what_a_unit_does_itself():
    """In a GRU that is the gate z."""
    network, data = model("gru"), stream(6)
    gates = _gates(network, data)
    calls = 0

    def carry(name, J, P, F):
        nonlocal calls
        gate, calls = gates[calls // 4], calls + 1  # four parameters for each step and stream
        return gate[:, None] * P + F

    assert_same(online(network, ol.EProp(), data), with_influence(network, data, carry))


def _gates(network, data):
    """z of every step and stream."""
    cell, h, gates = network.cells[0], network.initial_state(3), []
    for x, _ in data:
        s = x @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
        gates += [torch.sigmoid(row[4:8]).detach() for row in s]
        h = network(x, h)[1]
    return gates


def test_eprop_is_truncation_to_two_steps_in_a_plain_network():
    network, data = model("rnn"), stream(5)
    assert_same(online(network, ol.EProp(), data), online(network, ol.TBPTT(2), data))


def test_rflo_fades_and_feeds_back_at_random():
    network, data = model("rnn"), stream(4)
    n, streams = 5, 3
    B = torch.randn(2, n, generator=torch.Generator().manual_seed(0))  # of the seed of `Online`
    B = B.double() / n**0.5
    h, T = network.initial_state(streams), {}
    network.zero_grad()
    for x, target in data:
        output, after = network(x, h.detach())
        e = 2 * (output - target).detach() / 2 / streams
        loss_fn(output, target).mean().backward()
        z = {"weight_ih": x, "bias_ih": torch.ones(3, 1).double(), "weight_hh": h.detach()}
        z["bias_hh"] = z["bias_ih"]
        for name, value in T.items():
            p = network.get_parameter(f"cells.0.{name}")
            p.grad += 0.7 * torch.einsum("bi,bij->ij", e @ B, value).view_as(p)
        gate = (1 - after**2).detach()
        T = {name: 0.7 * T.get(name, 0) + gate[:, :, None] * v[:, None, :] for name, v in z.items()}
        h = after
    expected = grads(network)
    assert_same(online(network, ol.RFLO(0.7), data), expected)


@pytest.mark.parametrize("steps", [2, 4])
def test_tbptt_forgets_what_is_older(steps):
    network, data = model("gru"), stream(6)
    network.zero_grad()
    states = [network.initial_state(3)]
    for x, _ in data:
        states.append(network(x, states[-1])[1].detach())
    for t, (_, target) in enumerate(data):
        first = max(0, t - steps + 1)
        h = states[first]
        for x, _ in data[first : t + 1]:
            output, h = network(x, h)
        loss_fn(output, target).mean().backward()
    expected = grads(network)
    assert_same(online(network, ol.TBPTT(steps), data), expected)


@pytest.mark.parametrize("basis", BASES)
def test_wperp_carries_the_influence_in_its_basis(basis):
    """Between two searches V is fixed: the twin takes it from the rule and does the rest with dense matrices."""
    network, data = model("rnn"), stream(6)
    learner = ol.Online(network, ol.WPerp(2, basis, refresh=100))
    learner(loss_fn, *data[0])
    V = learner.state_dict()["shared/V"]
    torch.testing.assert_close(V.T @ V, torch.eye(2).double())
    project = V @ V.T
    expected = with_influence(network, data, lambda name, J, P, F: project @ (J @ P + F))
    assert_same(online(network, ol.WPerp(2, basis, refresh=100), data), expected)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_block_is_exact_and_the_basis_cuts_where_it_begins(basis, steps):
    """With dense matrices: the graph of the block, and at its end `P ← VVᵀ P` with the basis that was found there."""
    network, data = model("rnn"), stream(8)
    rule = ol.Blockwise(ol.WPerp(2, basis, refresh=steps))
    learner, bases = ol.Online(network, rule), []
    for step in data:
        learner(loss_fn, *step)
        bases.append(learner.state_dict()["shared/V"])
    network.zero_grad()
    states, first, influence = [network.initial_state(3)], 0, [{}, {}, {}]
    for t, (x, target) in enumerate(data):
        h = leaf = states[first].clone().requires_grad_()
        for past, _ in data[first : t + 1]:
            output, h = network(past, h)
        loss_fn(output, target).mean().backward()
        for q, P in zip(leaf.grad, influence, strict=True):
            for name, value in P.items():
                network.get_parameter(name).grad += (q @ value).view_as(network.get_parameter(name))
        if t % steps == 0:
            for s in range(first, t):
                for b in range(3):
                    J, F = one_step_jacobians(network, data[s][0][b], states[s][b])
                    influence[b] = {name: J @ influence[b].get(name, 0 * f) + f for name, f in F.items()}
            cut, first = bases[t] @ bases[t].T, t
            influence = [{name: cut @ value for name, value in P.items()} for P in influence]
        states.append(network(x, states[-1])[1].detach())
    expected = grads(network)
    assert_same(online(network, rule, data), expected)


@pytest.mark.parametrize("basis", BASES)
def test_what_leaves_the_basis_is_left_to_snap(basis):
    """With dense matrices: `P = VVᵀ (J P + F) + (I - VVᵀ) D`."""
    network, data = model("rnn"), stream(6)
    learner = ol.Online(network, ol.Completed(ol.WPerp(2, basis, refresh=100)))
    learner(loss_fn, *data[0])
    V = learner.state_dict()["shared/V"]
    project, beyond, n, calls = V @ V.T, torch.eye(len(V)).double() - V @ V.T, len(V), 0
    D: dict[int, torch.Tensor] = {}

    def carry(parameter, J, P, F):
        nonlocal calls
        place, calls = calls % (3 * 4), calls + 1  # four parameters of three streams
        rows = torch.arange(F.shape[1]) // (F.shape[1] // network.get_parameter(parameter).shape[0])
        mask = (torch.arange(n)[:, None] == rows).to(F)
        D[place] = mask * (J @ D.get(place, torch.zeros_like(F)) + F)
        return project @ (J @ P + F) + beyond @ D[place]

    expected = with_influence(network, data, carry)
    assert_same(online(network, ol.Completed(ol.WPerp(2, basis, refresh=100)), data), expected)


def test_a_new_basis_takes_over_the_influence():
    network, data = model("rnn"), stream(5)
    learner = ol.Online(network, ol.WPerp(3, "wperp", refresh=2))
    for step in data[:2]:
        learner(loss_fn, *step)
    before = learner.state_dict()
    learner(loss_fn, *data[2])
    after = learner.state_dict()
    V, new = before["shared/V"], after["shared/V"]
    assert not torch.allclose(V, new)
    for b in range(3):
        J, F = one_step_jacobians(network, data[2][0][b], before["now/h"][b])
        for name, f in F.items():
            P = new @ (new.T @ V @ before[f"rows/P/{name}"][b])
            torch.testing.assert_close(after[f"rows/P/{name}"][b], new.T @ (J @ P + f))


def test_the_krylov_basis_spans_what_the_next_losses_see():
    torch.manual_seed(0)
    J, c = torch.randn(1, 9, 9).double() / 3, torch.randn(9).double()
    V = BASES["krylov"](J, torch.outer(c, c), 4)
    seen = torch.stack([c @ torch.linalg.matrix_power(J[0], lag) for lag in range(4)])
    torch.testing.assert_close(seen @ V @ V.T, seen)


@pytest.mark.parametrize(
    ("basis", "gramian"),
    [
        ("lagged", lambda terms: sum(term / term.trace() / lag for lag, term in enumerate(terms, 1))),
        ("observable", lambda terms: sum(terms[:41])),
        ("wperp", lambda terms: terms[1]),  # with S = I
    ],
)
def test_a_basis_is_that_of_its_gramian(basis, gramian):
    torch.manual_seed(0)
    J, S = torch.randn(3, 6, 6).double() / 4, torch.randn(6, 6).double()
    S = torch.eye(6).double() if basis == "wperp" else S @ S.T
    powers = [torch.linalg.matrix_power(J.mean(0), lag) for lag in range(128)]
    top = torch.linalg.eigh(gramian([A.T @ S @ A for A in powers]))[1][:, -2:]
    V = BASES[basis](J, S, 2)
    torch.testing.assert_close(V @ V.T, top @ top.T)


def test_uoro_is_exact_in_the_mean():
    """20 groups of 200 draws; five standard errors of the mean, which are a tenth of the gradient at most."""
    network, data = model("rnn"), stream(4, streams=1)
    exact = online(network, ol.RTRL(), data)
    many = [(x.expand(200, -1), t.expand(200, -1)) for x, t in data]
    draws = [online(network, ol.UORO(), many, seed) for seed in range(20)]
    for name, value in exact.items():
        found = torch.stack([draw[name] for draw in draws])
        error = found.std(0) / 20**0.5
        assert error.norm() < 0.1 * value.norm()
        assert ((found.mean(0) - value).abs() <= 5 * error + 1e-12).all(), name


def test_wperp_remembers_where_errors_pointed():
    network, data = model("rnn"), stream(3)
    learner = ol.Online(network, ol.WPerp(2))
    h, S = network.initial_state(3), torch.zeros(5, 5).double()
    for x, target in data:
        learner(loss_fn, x, target)
        leaf = h.detach().requires_grad_()
        output, h = network(x, leaf)
        (q,) = torch.autograd.grad(loss_fn(output, target).mean(), leaf)
        S = 0.99 * S + q.T @ q
    torch.testing.assert_close(learner.state_dict()["shared/S"], S)


def test_snap_of_the_first_order_keeps_what_one_step_reaches():
    """In an LRU a weight of the real part moves the real part alone, within one step."""
    network, data = model("lru"), stream(5)

    def carry(parameter, J, P, F):
        rows = network.get_parameter(parameter).shape[0]
        mask = torch.zeros(8, rows).double()
        units = torch.arange(rows)
        if "imaginary" not in parameter:
            mask[units, units] = 1
        if "real" not in parameter:
            mask[4 + units, units] = 1
        return mask.repeat_interleave(F.shape[1] // rows, 1) * (J @ P + F)

    assert_same(online(network, ol.SnAp(1), data), with_influence(network, data, carry))


def test_a_late_loss_ends_no_block():
    """Losses two steps late: blocks of four steps stay whole, and the error is noted."""
    torch.manual_seed(0)
    model = ol.Recurrent(torch.nn.RNNCell(2, 6), torch.nn.Linear(6, 1))
    learner, waiting, ages = ol.Online(model, ol.Blockwise(ol.WPerp(k=3, refresh=4))), [], []
    for step in range(12):
        learner(None, torch.randn(3, 2))
        waiting.append(learner.later())
        if step >= 2:
            waiting.pop(0)(lambda output, target: (output - target).square().mean(1), torch.zeros(3, 1))
        ages.append(int(learner.state_dict()["rows/age"].max()))
    assert ages == [1, 2, 3, 4] * 3
    assert bool(learner.state_dict()["shared/S"].any())
