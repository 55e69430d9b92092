"""Direct feedback alignment, with fixed matrices and with those that forward gradients teach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_unbiased
from gradguess.noise import Noise
from models import Case, generator, make

DRAWS = 400  # of the statistical test


def by_hand(case: Case, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """`ĝ = D B e` layer by layer, for the zoo's MLP with ReLUs and biases."""
    layers = [layer for layer in case.model if isinstance(layer, nn.Linear)]
    names = [name for name, layer in case.model.named_children() if isinstance(layer, nn.Linear)]
    x, inputs, outputs = case.inputs, [], []
    for layer in layers:
        inputs.append(x)
        outputs.append(x @ layer.weight.t() + layer.bias)
        x = outputs[-1].clamp_min(0)
    e = outputs[-1].softmax(1) - nn.functional.one_hot(case.targets, outputs[-1].shape[1])
    grads = {}
    for name, x, s in zip(names, inputs, outputs, strict=True):
        g = (s > 0) * (e @ matrices[name].t()) if name in matrices else e
        grads |= {f"{name}.weight": g.t() @ x / len(x), f"{name}.bias": g.mean(0)}
    return grads


def stepped(case: Case, method: gg.methods.Method, **options) -> gg.ForwardGradient:
    forward = gg.ForwardGradient(case.model, method, **options)
    forward(*case.args)
    return forward


def assert_by_hand(case: Case, forward: gg.ForwardGradient) -> None:
    expected = by_hand(case, {name: entries["B"] for name, entries in forward.learned.items()})
    for name, p in case.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"memory": "replay"}, {"chunk": 2}], ids=str)
def test_dfa_takes_the_error_through_fixed_matrices(options):
    case = make("relu-bias")
    forward = stepped(case, gg.baselines.DFA(), **options)
    assert_by_hand(case, forward)
    before = {name: entries["B"].clone() for name, entries in forward.learned.items()}
    forward(*case.args)
    assert all(torch.equal(forward.learned[name]["B"], B) for name, B in before.items())


def test_the_matrices_have_the_scale_of_a_layer_and_a_seed():
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 50))
    case = Case(model, torch.randn(3, 6), torch.tensor([0, 1, 2]))
    found = [stepped(case, gg.baselines.DFA(seed)).learned["0"]["B"] for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert found[0].std() == pytest.approx(400**-0.5, rel=0.02)


def test_fdfa_predicts_with_what_it_has_just_learned():
    case = make("relu-bias")
    assert_by_hand(case, stepped(case, gg.baselines.FDFA(momentum=0.3)))


def test_fdfa_learns_a_running_mean_of_raw_estimates():
    """One hidden layer, against `B ← (1 - α) B + α mean_b φ uᵀ` with the directions that were drawn."""
    case = make("relu-bias")
    case.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    forward = gg.ForwardGradient(case.model, gg.baselines.FDFA(momentum=0.3))
    B = torch.zeros(5, 4, dtype=torch.float64)
    open_units = (case.model[0](case.inputs) > 0).double()
    for _ in range(3):
        source = torch.Generator().manual_seed(0)
        source.set_state(forward.generator.get_state())
        y = Noise(source).batched(1, 5, 5, torch.float64, torch.device("cpu"))[0]
        phi = open_units * y
        B = 0.7 * B + 0.3 * phi.t() @ (phi @ case.model[2].weight.detach().t()) / 5
        forward(*case.args)
        torch.testing.assert_close(forward.learned["0"]["B"], B, rtol=1e-10, atol=1e-12)


def test_the_raw_estimate_has_the_mean_of_the_jacobians():
    """Two hidden layers: `E[φ uᵀ] = mean_b D² Jᵀ`, within five standard errors of 400 draws."""
    case, found = make("relu-bias"), {"0": [], "2": []}
    source = generator(1)
    for _ in range(DRAWS):
        forward = gg.ForwardGradient(case.model, gg.baselines.FDFA(momentum=1.0))
        forward.generator = source
        forward(*case.args)
        for name, draws in found.items():
            draws.append(forward.learned[name]["B"])
    W = {name: case.model[int(name)].weight.detach() for name in ("2", "4")}
    s0 = case.model[0](case.inputs).detach()
    D0, D2 = (s0 > 0).double(), (case.model[2](s0.clamp_min(0)).detach() > 0).double()
    expected = {
        "0": torch.stack(
            [torch.diag(a) @ W["2"].t() @ torch.diag(b) @ W["4"].t() for a, b in zip(D0, D2, strict=True)]
        ),
        "2": torch.stack([torch.diag(b) @ W["4"].t() for b in D2]),
    }
    for name, draws in found.items():
        assert_unbiased(torch.stack(draws), expected[name].mean(0))
