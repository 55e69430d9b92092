from __future__ import annotations

import math

import torch
from torch import nn

from gradguess.experiments.models import mlp


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


def test_layers_and_biases():
    model = mlp(40, 8, 2, 10, bias=True, activation="gelu")
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert model[0].bias.shape == (8,)
    assert model(torch.zeros(3, 40)).shape == (3, 10)
