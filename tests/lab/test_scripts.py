"""What the authors' scripts do: each change against its definition, written out."""

import dataclasses

import pytest
import torch

import gradguess as gg
from gradguess.linalg.step_polynomials import SETS
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.scripts import FlooredNS, ReducedBottom
from gradguess_lab.train import build_method, build_model

CONFIG = TrainConfig(method="wt", width=24, depth=3, epochs=1, batch=64, samples=128, dtype="float64", script="mask")


def network(config: TrainConfig, biases: bool = True):
    data = load("mnist1d").first(config.samples).to("cpu", torch.float64)
    model = build_model(config, data)
    if biases:
        with torch.no_grad():
            for number, layer in enumerate(model[::2]):
                layer.bias.copy_(0.2 * torch.randn(layer.bias.shape, generator=torch.Generator().manual_seed(number)))
    return model, data.x_train[:64], data.y_train[:64]


def test_the_bias_is_in_the_gate_of_the_guess_and_nowhere_else():
    model, x, y = network(CONFIG)
    plain, _, _ = network(dataclasses.replace(CONFIG, script=""), biases=False)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)  # the forward pass does not see it
    method = build_method(CONFIG, model)
    est = gg.estimate(model, method, per_sample_loss, x, y, tangents=200)
    s = model[0](x)
    wrong, right = s > 0, s + model[0].bias > 0
    assert (wrong != right).any()
    drawn = est.directions["0"].abs().amax(0) > 0
    assert torch.equal(drawn, right)
    # the derivative is the true one: that of the network without biases
    single = gg.estimate(model, method, per_sample_loss, x, y, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in _outputs(plain, x)]
    losses = per_sample_loss(_rest(plain, leaves), y)
    truth = torch.autograd.grad(losses.sum(), leaves)
    c = sum((g * single.directions[name][0]).sum(1) for g, name in zip(truth, ("0", "2", "4", "6"), strict=True))
    torch.testing.assert_close(single.jvp[0], c)


def _outputs(model, x):
    found = []
    for layer in model:
        x = layer(x)
        if isinstance(layer, torch.nn.Linear):
            found.append(torch.zeros_like(x))
    return found


def _rest(model, leaves):
    data = load("mnist1d").first(128).to("cpu", torch.float64)
    x, at = data.x_train[:64], iter(leaves)
    for layer in model:
        x = layer(x)
        if isinstance(layer, torch.nn.Linear):
            x = x + next(at)
    return x


@pytest.mark.parametrize("site", ["0", "4"])
def test_the_bottom_of_a_reduced_decomposition(site):
    """Below ten rows it is the top ten; elsewhere the bottom of all."""
    config = dataclasses.replace(CONFIG, method="wperp-bottom", solver="subspace", script="bottom")
    model, x, y = network(config, biases=False)
    method = build_method(config, model)
    assert isinstance(method, ReducedBottom)
    directions = gg.estimate(model, method, per_sample_loss, x, y, tangents=60).directions[site][:, 0]
    layer = model[int(site) + 2]
    W = layer.weight.detach() * (_before(model, int(site), x)[0] > 0)
    _, _, Vh = torch.linalg.svd(W, full_matrices=False)
    chosen = Vh[-10:] if site == "4" else torch.linalg.svd(W)[2][-10:]
    if site == "4":
        torch.testing.assert_close(directions @ chosen.mT @ chosen, directions)
        assert torch.linalg.matrix_rank(directions) == 10
    else:
        torch.testing.assert_close(directions @ W.mT, torch.zeros(60, len(W), dtype=torch.float64))


def _before(model, site, x):
    for layer in model[: site + 1]:
        x = layer(x)
    return x


def test_floor_takes_sample_0_and_rounds_down():
    config = dataclasses.replace(CONFIG, method="wperp-ns", script="floor", k=4)
    model, x, y = network(config, biases=False)
    x, y = x[:6], y[:6]
    method = build_method(config, model)
    assert isinstance(method, FlooredNS)
    W = model[2].weight.detach() * (model[0](x) > 0)[:, None, :]
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    ratio = float(S[0, 3] / S[0, 0])
    (entry,) = (e for e in SETS if round(10 * e.sigma) == int(10 * ratio))
    sample = 5
    z = gg.estimate(model, method, per_sample_loss, x, y, tangents=4000).directions["0"][:, sample]
    p = S[sample] / max(float(S[0, 0]), 1.02 * float(S[sample, 0]))
    for _ in range(5):
        p = sum(a * p ** (2 * j + 1) for j, a in enumerate(entry.coefficients))
    found = z.mT @ z / len(z)
    expected = Vh[sample].mT @ torch.diag(p**2) @ Vh[sample]
    assert torch.linalg.matrix_norm(found - expected, 2) < 0.25 * torch.linalg.matrix_norm(expected, 2)
