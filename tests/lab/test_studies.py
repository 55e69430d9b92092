"""Studies of learned feedback: other rules (`learn`) and other matrices at first (`start`) than the library's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess_lab.studies import studied_feedback
from models import CLASSES, INPUTS, Case, generator, make, mlp
from steps import step_of

SLOPES = {"relu": lambda s: (s > 0).double(), "tanh": lambda s: 1 - torch.tanh(s) ** 2}


def wide(widths: tuple[int, ...] = (8, 7), batch: int = 32, seed: int = 0, classes: int = CLASSES) -> Case:
    """A ReLU network without biases, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = (INPUTS, *widths, classes)
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b, bias=False), nn.ReLU())]
        model = nn.Sequential(*layers[:-1]).double()
        return Case(model, torch.randn(batch, INPUTS).double(), torch.randint(classes, (batch,)))


class Dense:
    """An MLP written out: outputs, gates, the error, and every sample's Jacobian to the outputs."""

    def __init__(self, case: Case) -> None:
        layers = list(case.model)
        slope = SLOPES[type(layers[1]).__name__.lower()]
        self.weights = [layer.weight.detach() for layer in layers[::2]]
        self.gates, x = [], case.inputs
        for linear, activation in zip(layers[:-1:2], layers[1::2], strict=True):
            s = linear(x).detach()
            self.gates.append(slope(s))
            x = activation(s)
        outputs = layers[-1](x).detach().requires_grad_()
        (self.e,) = torch.autograd.grad(case.loss_fn(outputs, case.targets).sum(), outputs)
        self.J: list[Tensor] = []  # (batch, classes, d) of each hidden site
        J = torch.eye(self.e.shape[1]).double().expand(len(self.e), -1, -1)
        for W, gate in zip(reversed(self.weights[1:]), reversed(self.gates), strict=True):
            J = (J @ W) * gate[:, None, :]
            self.J.insert(0, J)

    def g(self, i: int) -> Tensor:
        return (self.J[i].mT @ self.e[..., None])[..., 0]


def random_B(case: Case, seed: int = 3) -> dict[str, dict[str, Tensor]]:
    dense = Dense(case)
    shape = {str(2 * i): (J.shape[2], J.shape[1]) for i, J in enumerate(dense.J)}
    return {name: {"B": torch.randn(s, generator=generator(seed + int(name))).double()} for name, s in shape.items()}


# --- rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", ["outputs", "weighted", "loss"])
@pytest.mark.parametrize("tangents", [1, 2])
def test_learning_is_least_mean_squares_of_the_outputs_tangents(learn, tangents):
    case, rate = wide(), 0.3
    before = {name: entry["B"] for name, entry in random_B(case).items()}
    method = studied_feedback(gg.ActivationPerturbation(), form="direct", rate=rate, learn=learn)
    est, state = method.run(step_of(case, method, learned=random_B(case), tangents=tangents))
    learned = state.learned

    dense, b = Dense(case), len(case.targets)
    power = dense.e.square().sum(1)
    weight = torch.ones(b).double() / b if learn == "outputs" else power / power.sum()
    effective = 1 / weight.square().sum()  # samples, as many as their weights are worth
    change = {name: torch.zeros_like(B) for name, B in before.items()}
    lambdas = dict.fromkeys(range(tangents), 0.0)
    v: dict[str, Tensor] = {}
    for t in range(tangents):
        y = [est.directions["0"][t], est.directions["2"][t]]
        phi = [gate * direction for gate, direction in zip(dense.gates, y, strict=True)]
        arriving = phi[0] @ dense.weights[1].mT
        sigma = [1.0, arriving.norm() / y[1].norm()]
        u = sum(s * (J @ d[..., None])[..., 0] for s, J, d in zip(sigma, dense.J, y, strict=True))
        r = u - sum(s * p @ B for s, p, B in zip(sigma, phi, before.values(), strict=True))
        for name, p in zip(before, phi, strict=True):
            v[name] = v.get(name, p.abs().sum(0) + 1e-6)
            for _ in range(2):  # power iteration, as coarse as the library's
                v[name] = p.mT @ (p @ (v[name] / v[name].norm())) / b
            lambdas[t] = max(lambdas[t], float(v[name].norm()))
        K = sum(p.square().sum() for p in phi) / b
        mu = rate / (lambdas[t] + K / (effective * tangents)) / tangents
        for s, p, name in zip(sigma, phi, before, strict=True):
            wrong = (r * dense.e).sum(1, keepdim=True) * dense.e / power[:, None] if learn == "loss" else r
            change[name] += mu / s * p.mT @ (weight[:, None] * wrong)
    for name, B in before.items():
        torch.testing.assert_close(learned[name]["B"], B + change[name])


def test_momentum_is_a_running_mean_of_raw_estimates():
    case, rate = wide(), 0.1
    before = {name: entry["B"] for name, entry in random_B(case).items()}
    method = studied_feedback(gg.ActivationPerturbation(), form="direct", rate=rate, learn="momentum")
    est, state = method.run(step_of(case, method, learned=random_B(case)))
    learned = state.learned
    dense, b = Dense(case), len(case.targets)
    y = [est.directions["0"][0], est.directions["2"][0]]
    phi = [gate * direction for gate, direction in zip(dense.gates, y, strict=True)]
    sigma = [1.0, (phi[0] @ dense.weights[1].mT).norm() / y[1].norm()]
    u = sum(s * (J @ d[..., None])[..., 0] for s, J, d in zip(sigma, dense.J, y, strict=True))
    for s, p, (name, B) in zip(sigma, phi, before.items(), strict=True):
        torch.testing.assert_close(learned[name]["B"], (1 - rate) * B + rate * p.mT @ u / b / s)


# --- never, and a random start -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_what_never_learns_predicts_the_gated_error(activation):
    case = Case(mlp(activation).double(), *make("relu-bias").args[1:])
    learned = random_B(case)
    method = studied_feedback(gg.WPerp(k=3), form="direct", learn="never")
    est, state = method.run(step_of(case, method, learned=learned))
    dense = Dense(case)
    for i, gate in enumerate(dense.gates):
        expected = gate * (dense.e @ learned[str(2 * i)]["B"].mT)
        torch.testing.assert_close(est.site_grads[str(2 * i)], expected)
        assert torch.equal(state.learned[str(2 * i)]["B"], learned[str(2 * i)]["B"])
    assert est.jvp.shape[0] == 0  # no tangent was carried
