"""The stacked training of the common-network experiment against the library, in float64; and its verdict."""

import json

import pytest
import torch

import gradguess as gg
from gradguess_lab import common_measures
from gradguess_lab.common_network import BIASES, TRAINED, Member, Stack, leading, linears
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.scripts import scripted
from gradguess_lab.tables.common import SIX

GUESSES = {
    "wt": gg.WTranspose(),
    "wperp": gg.WPerp(solver="svd"),
    "wperp-bottom": gg.WPerp(solver="subspace", end="bottom"),
    "backprop": gg.Backprop(),
}
SITES = ("0", "2", "4", "6")
PLACES = torch.arange(24)[None]


def stack_of(trained: str, biases: str) -> tuple[Stack, torch.nn.Sequential]:
    """A stack of one network, and that network; biases are not zero."""
    data = load("mnist1d").first(24).to("cpu", torch.float64)
    stack, net = Stack([Member(trained, biases, 3)], data), Member(trained, biases, 3).network().double()
    for layer, module in enumerate(linears(net)):
        if biases != "none":
            b = 0.2 * torch.randn(stack.biases[layer].shape, generator=torch.Generator().manual_seed(layer)).double()
            stack.biases[layer].copy_(b)
            module.bias.data.copy_(b[0])
    return stack, net


def method_of(trained: str, biases: str, net: torch.nn.Sequential):
    return scripted("mask" if biases == "gate" else "", GUESSES[trained], net)


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("trained", GUESSES)
def test_equal_directions_give_the_gradients_of_the_library(trained, biases):
    stack, net = stack_of(trained, biases)
    x, y = stack.data.x_train, stack.data.y_train
    est = gg.estimate(net, method_of(trained, biases, net), per_sample_loss, x, y)
    inputs, outputs = stack.forward(x[None])
    directions = [est.directions[site] for site in SITES] if est.directions else [torch.zeros_like(s) for s in outputs]
    c, found = stack.cotangents(outputs, directions, y[None])
    if trained != "backprop":
        torch.testing.assert_close(c[0], est.jvp[0])
    for site, g, below in zip(SITES, found, inputs, strict=True):
        torch.testing.assert_close((g.mT @ below)[0], est.grads[f"{site}.weight"])
        if biases != "none":
            torch.testing.assert_close(g.sum(1)[0], est.grads[f"{site}.bias"])


@pytest.mark.parametrize("biases", BIASES)
def test_the_guessing_space_is_each_samples_own_top(biases):
    stack, net = stack_of("wperp", biases)
    x, y = stack.data.x_train, stack.data.y_train
    est = gg.estimate(net, method_of("wperp", biases, net), per_sample_loss, x, y, tangents=12)
    outputs = stack.forward(x[None])[1]
    for layer, site in enumerate(SITES[:-1]):
        rows, inner = stack.frame("wperp", layer, stack.gate(layer, outputs), PLACES)
        P = (rows.mT @ rows if inner is None else rows.mT @ inner @ rows)[0]
        torch.testing.assert_close(P.diagonal(dim1=1, dim2=2).sum(1), torch.full((24,), 10.0, dtype=P.dtype))
        v = est.directions[site].permute(1, 2, 0)  # twelve directions span the space
        torch.testing.assert_close(P @ v, v, rtol=0, atol=1e-3)
        torch.testing.assert_close(P @ P, P, rtol=0, atol=1e-3)


@pytest.mark.parametrize("trained", ["wt", "wperp", "wperp-bottom"])
def test_many_directions_have_the_covariance_of_the_library(trained):
    stack, net = stack_of(trained, "gate")
    x, y = stack.data.x_train, stack.data.y_train
    draws, outputs = (40 if trained == "wperp" else 200), stack.forward(x[None])[1]
    est = gg.estimate(net, method_of(trained, "gate", net), per_sample_loss, x, y, tangents=draws)
    ours = [stack.directions(outputs, PLACES)]
    stack.cold = False
    ours += [stack.directions(outputs, PLACES) for _ in range(draws - 1)]
    for layer, site in enumerate(SITES):
        mine, theirs = torch.stack([one[layer][0] for one in ours]), est.directions[site]
        used = [one.abs().amax(0) > 1e-9 for one in (mine, theirs)]
        assert torch.equal(*used)  # the same units
        sizes = [one.square().sum(-1).mean(0) for one in (mine, theirs)]
        torch.testing.assert_close(sizes[0].mean(), sizes[1].mean(), rtol=0.05, atol=0)


def test_backpropagation_takes_the_steps_of_the_library():
    stack, net = stack_of("backprop", "added")
    x, y = stack.data.x_train, stack.data.y_train
    ours = torch.optim.AdamW([*stack.weights, *stack.biases], 1e-4, weight_decay=0.01)
    theirs = torch.optim.AdamW(net.parameters(), 1e-4, weight_decay=0.01)
    forward = gg.ForwardGradient(net, gg.Backprop())
    for _ in range(3):
        stack.step(PLACES, ours)
        theirs.zero_grad()
        forward(per_sample_loss, x, y)
        theirs.step()
    for layer, module in enumerate(linears(net)):
        torch.testing.assert_close(stack.weights[layer][0], module.weight.data)
        torch.testing.assert_close(stack.biases[layer][0], module.bias.data)


def test_networks_of_a_stack_do_not_mix():
    data = load("mnist1d").first(24).to("cpu", torch.float64)
    stack = Stack([Member(name, biases, 0) for name in TRAINED for biases in BIASES], data)
    before = [W.clone() for W in stack.weights]
    stack.step(PLACES.expand(len(stack.members), -1), torch.optim.SGD([*stack.weights, *stack.biases], 1.0))
    for row, member in enumerate(stack.members):
        assert all((W[row] != old[row]).any() for W, old in zip(stack.weights, before, strict=True)), member
        assert (stack.biases[0][row] != 0).any() == (member.biases != "none")
    i = stack.members.index(Member("backprop", "none", 0))
    net = Member("backprop", "none", 0).network().double()
    truth = gg.estimate(net, gg.Backprop(), per_sample_loss, data.x_train, data.y_train).grads
    for layer, site in enumerate(SITES):
        torch.testing.assert_close(before[layer][i] - stack.weights[layer][i], truth[f"{site}.weight"])


def test_leading_is_the_projector_on_the_top():
    A = torch.randn(50, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    V = torch.linalg.eigh(A @ A.mT)[1][..., -10:]
    torch.testing.assert_close(leading(A @ A.mT, 10), V @ V.mT, rtol=0, atol=1e-6)


def test_a_setting_explains_only_with_all_six(tmp_path, capsys):
    printed = {(e.method, e.quantity): e.value for e in SIX.values()}
    assert len(printed) == 6
    rows = []
    for trained, factor in (("wt", 1.0), ("wperp", 1.5)):
        for seed in range(3):
            guesses = {}
            for method in ("wt", "wperp", "wperp-bottom"):
                bias, variance = printed[method, "bias"], (1 + 0.01 * seed) * printed[method, "variance"]
                if method == "wt":
                    variance *= factor
                guesses[method] = {"variance": variance, "drawn": 0.0, "bias": bias, "covariance_norm": 0.08}
            guesses["script-bottom"] = guesses["wperp-bottom"]
            settings = {"trained": trained, "biases": "none", "seed": seed, "epochs": 300}
            rows.append({**settings, "train_accuracy": 0.3, "guesses": guesses})
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = {"epochs": 300, "seconds": 1.0, "projector_errors": [], "environment": {"device": "cpu"}}
    (tmp_path / "progress.jsonl").write_text(json.dumps(line) + "\n")
    common_measures.keep([tmp_path], tmp_path / "study")
    capsys.readouterr()
    printed_tables = []
    for place in (tmp_path, tmp_path / "study"):
        common_measures.table([place])
        printed_tables.append(capsys.readouterr().out)
    assert printed_tables[0] == printed_tables[1]
    assert "6 of 6" in printed_tables[0]
    assert "5 of 6" in printed_tables[0]
    assert "4 settings tried: 1 of them explain all six numbers, and at most 6 hold in one." in printed_tables[0]
