from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradguess.errors import InputError
from gradguess_lab.data import Shape
from gradguess_lab.models import MODELS
from gradguess_lab.models.mlp import mlp


def test_initialisation_is_pytorchs_default_from_our_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = mlp(40, 256, 3, 10, generator=torch.Generator().manual_seed(1))
    assert torch.equal(before, torch.get_rng_state())
    again = mlp(40, 256, 3, 10, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        bound = 1 / math.sqrt(ours.shape[1])
        assert ours.abs().max() <= bound
        assert abs(ours.std().item() * math.sqrt(3) / bound - 1) < 0.05


SHAPES = {
    "signal": Shape("signal", (40,), 10),
    "digits": Shape("image", (1, 8, 8), 10),
    "image": Shape("image", (1, 28, 28), 10),
    "text": Shape("text", (12,), 20),
}
PAIRS = [(model, kind) for model in MODELS for kind in SHAPES if kind != "text" or model in ("charformer", "gru")]


def sample(shape: Shape, batch: int = 3) -> torch.Tensor:
    if shape.kind == "text":
        return torch.randint(shape.classes, (batch, *shape.size))
    return torch.randn(batch, *shape.size)


def build(model: str, shape: Shape, seed: int = 0, depth: int = 2) -> nn.Module:
    return MODELS[model](shape, 16, depth, False, "relu", torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("model", "kind"), PAIRS)
def test_every_network_fits_its_data(model: str, kind: str):
    shape = SHAPES[kind]
    if model == "charformer" and kind != "text":
        with pytest.raises(InputError, match="reads text"):
            build(model, shape)
        return
    expected = (3, *shape.size, shape.classes) if kind == "text" else (3, shape.classes)
    assert build(model, shape)(sample(shape)).shape == expected


@pytest.mark.parametrize("model", MODELS)
def test_weights_come_from_the_generator_alone(model: str):
    shape = SHAPES["text" if model == "charformer" else "digits"]
    before = torch.get_rng_state()
    first, again, other = build(model, shape), build(model, shape), build(model, shape, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_the_character_transformer_does_not_look_ahead():
    shape = SHAPES["text"]
    model, x = build("charformer", shape), sample(shape)
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % shape.classes
    torch.testing.assert_close(model(x)[:, :6], model(changed)[:, :6])
