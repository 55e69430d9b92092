"""Checkpoints: backpropagation's numbers, with pieces that are computed again."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from models import Case, Net, cross_entropy, make

ZOO = ["relu-bias", "gelu-bias", "in-place", "cnn", "residual", "transformer", "dropout", "batch-norm", "branching"]


def block(width: int) -> nn.Module:
    return Net(
        lambda m, x: torch.relu(x + m.second(m.drop(torch.relu(m.norm(m.first(x)))))),
        first=nn.Linear(width, width),
        second=nn.Linear(width, width),
        norm=nn.BatchNorm1d(width),
        drop=nn.Dropout(0.3),
    )


def sequences_inside() -> nn.Module:
    """Sequences inside a module that is none, as in a ResNet."""
    return Net(
        lambda m, x: m.head(m.high(m.low(m.stem(x)))),
        stem=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()),
        low=nn.Sequential(block(5), block(5)),
        high=nn.Sequential(block(5), block(5)),
        head=nn.Linear(5, 3),
    )


def net() -> Case:
    return Case(sequences_inside().double(), torch.randn(8, 6).double(), torch.randint(3, (8,)))


def steps(case: Case, method: gg.methods.Method, count: int = 2, **options) -> tuple[list[Tensor], Counter]:
    """Gradients and buffers after some steps, and how often each module ran in the last of them."""
    model, ran = copy.deepcopy(case.model), Counter()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: ran.update([name]))
    forward = gg.ForwardGradient(model, method, **options)
    torch.manual_seed(1)
    for _ in range(count):
        ran.clear()
        forward(*case.args)
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()], ran


def assert_backprop(case: Case, **options) -> Counter:
    expected, _ = steps(case, gg.Backprop(), **options)
    found, ran = steps(case, gg.baselines.Checkpointed(), **options)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return ran


@pytest.mark.parametrize("sites", [1, 2, 3, 4, 5])
def test_pieces_with_dropout_and_batch_norm(sites):
    ran = assert_backprop(net(), sites=sites)
    twice = {name for name, times in ran.items() if times == 2}
    pieces = {
        1: set(),
        2: {"low.0", "low.1"},
        3: {"low.0", "low.1", "high.0"},
        4: {"low.0", "low.1", "high.0"},
        5: {"low.0", "low.1", "high.0"},
    }
    blocks = {"low.0", "low.1", "high.0", "high.1"}
    assert twice & blocks == pieces[sites]  # the last piece is not computed again
    assert max(ran.values()) <= 2


@pytest.mark.parametrize("sites", ["auto", 2])
@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_model(name, sites):
    if name == "branching" and sites == 2:
        pytest.skip("it has no place to be cut")
    assert_backprop(make(name), sites=sites)


def test_a_norm_that_two_pieces_share_counts_both_calls():
    """Pieces are computed again from the last to the first: the buffers are still those of the last call."""
    norm = nn.BatchNorm1d(5)
    layers = [nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 5), norm, nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)]
    model = nn.Sequential(nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:6]), *layers[6:]).double()
    case = Case(model, torch.randn(8, 6).double(), torch.randint(3, (8,)))
    ran = assert_backprop(case, sites=["0", "1", "3"])
    assert ran["0.0"] == ran["1.0"] == 2


def test_a_weight_that_depends_on_buffers_is_computed_from_the_same():
    """Spectral norm in its training mode moves its buffers before it reads them."""
    spectral = [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in spectral), nn.Linear(6, 3)).double()
    case = Case(model, torch.randn(5, 6).double(), torch.randint(3, (5,)))
    ran = assert_backprop(case, sites=["0", "1", "2", "4"])
    assert ran["0"] == 2


def test_an_input_that_is_changed_in_place_is_refused():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            x += self.inner(x.clone())
            return x

    model = nn.Sequential(nn.Linear(4, 4), Adds(), Adds(), nn.Linear(4, 3))
    forward = gg.ForwardGradient(model, gg.baselines.Checkpointed(), sites=["0", "1", "3"])
    with pytest.raises(gg.InputError, match="a piece changes its input in place"):
        forward(cross_entropy, torch.randn(3, 4), torch.tensor([0, 1, 2]))
