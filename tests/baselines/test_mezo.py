"""MeZO: two plain passes, the same noise drawn again, and the weights back as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_unbiased
from models import Case, make

DRAWS = 3000  # of the statistical test


def moved(case: Case, z: dict[str, Tensor], distance: float) -> Tensor:
    own = {name: p.detach() + distance * z[name] for name, p in case.model.named_parameters()}
    return case.loss_fn(torch.func.functional_call(case.model, own, case.inputs), case.targets)


@pytest.mark.parametrize("tangents", [1, 3])
@pytest.mark.parametrize("name", ["relu-bias", "cnn", "residual"])
def test_two_passes_along_a_direction_that_is_kept(name, tangents):
    case = make(name)
    est = gg.estimate(case.model, gg.baselines.MeZO(epsilon=1e-2), *case.args, tangents=tangents)
    grads = {name: torch.zeros_like(p) for name, p in case.model.named_parameters()}
    for i in range(tangents):
        z = {name: y[i] for name, y in est.directions.items()}
        c = (moved(case, z, 1e-2) - moved(case, z, -1e-2)) / 2e-2
        torch.testing.assert_close(est.jvp[i], c.detach(), rtol=1e-9, atol=1e-11)
        for name, y in z.items():
            grads[name] += c.detach().mean() * y / tangents
    for name, grad in grads.items():
        torch.testing.assert_close(est.grads[name], grad, rtol=1e-9, atol=1e-11)


def test_the_mean_is_the_gradient():
    """Within five standard errors of 3000 draws; the bias of ε = 1e-4 is far below that."""
    case = Case(nn.Linear(3, 2).double(), torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0]))
    forward = gg.ForwardGradient(case.model, gg.baselines.MeZO(epsilon=1e-4))
    draws = []
    for _ in range(DRAWS):
        case.model.zero_grad()
        forward(*case.args)
        draws.append(case.model.weight.grad)
    exact = gg.estimate(case.model, gg.Backprop(), *case.args).grads["weight"]
    assert_unbiased(torch.stack(draws), exact)


def test_weights_come_back_to_the_bit_in_float32():
    """Adding and subtracting the same noise would not do: that it does not is checked as well."""
    model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))
    case = Case(model, torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    before = [p.detach().clone() for p in model.parameters()]
    gg.ForwardGradient(model, gg.baselines.MeZO())(*case.args)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    z = 1e-3 * torch.randn_like(before[0])
    assert not torch.equal(before[0] + z - 2 * z + z, before[0])


def test_weights_come_back_when_the_second_pass_fails():
    case, calls = make("relu-bias"), []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        if calls.count(len(targets)) == 3:  # the first call lays the model out
            raise KeyError("the loss failed")
        return case.loss_fn(outputs, targets)

    before = [p.detach().clone() for p in case.model.parameters()]
    forward = gg.ForwardGradient(case.model, gg.baselines.MeZO())
    with pytest.raises(KeyError, match="the loss failed"):
        forward(loss_fn, case.inputs, case.targets)
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))


def test_both_passes_have_the_same_masks_and_buffers_are_written_once():
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    case = Case(model, torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 0, 1]))
    forward = gg.ForwardGradient(model, gg.baselines.MeZO(epsilon=1e-9))  # other masks would give a derivative of 1e8
    forward(*case.args)
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e3
    assert model[1].num_batches_tracked == 1
