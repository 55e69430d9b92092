"""Gradients that are not finite, though losses and derivatives are, do not reach `.grad` unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.methods.base import Estimate

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
METHODS = [gg.Backprop(), gg.Students(), gg.WPerp(k=3), gg.Feedback(gg.WPerp(k=3)), gg.WeightPerturbation()]


class Root(torch.autograd.Function):
    """The identity, whose derivative is infinite where it is told to be."""

    infinite = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / 0 if Root.infinite else g

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * Root.apply(self.scale)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Scaled(), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("method", METHODS[:4], ids=repr)
def test_an_infinite_gradient_is_told_or_skipped(method, monkeypatch):
    x, t = torch.randn(6, 5), torch.arange(6) % 3
    model = network()
    forward = gg.ForwardGradient(model, method)
    forward(CROSS_ENTROPY, x, t)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(Root, "infinite", True)
    with pytest.raises(gg.NonFiniteError, match=r"gradient of '1.scale', though .* at step 1 is NaN or infinite"):
        forward(CROSS_ENTROPY, x, t)
    forward.nonfinite = "skip"
    forward(CROSS_ENTROPY, x, t)
    assert forward.skipped == 1
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name])
    with pytest.raises(gg.NonFiniteError, match=r"gradient of .1.scale."):
        gg.estimate(model, method, CROSS_ENTROPY, x, t)


def test_large_numbers_are_numbers():
    """Their sums and norms overflow."""
    large = torch.full((4,), 3e38)
    result = Estimate(large.mean(), {"a": large, "b": large.half().fill_(6e4)}, large[None], losses=large)
    assert result.is_finite()
    result.grads["a"] = torch.tensor([1.0, torch.nan])
    assert not result.is_finite()
