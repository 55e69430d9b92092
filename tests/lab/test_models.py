from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess.errors import InputError
from gradguess_lab import networks
from gradguess_lab.config import MODELS
from gradguess_lab.data import Shape
from gradguess_lab.networks import TEXT, Rotary

SEEDED = {  # loss, and length of W⊥'s estimate
    "mlp": (2.294170944, 5.483760621),
    "residual": (2.491353879, 7.818187889),
    "cnn": (2.331998020, 2.715632791),
    "resnet": (2.159690580, 12.069683176),
    "resnet18": (2.329956824, 5.619584711),
    "mixer": (2.425689145, 15.491565742),
    "vit": (2.171555259, 22.882453587),
    "charformer": (3.283781026, 18.130528955),
    "gru": (2.234737244, 3.712041611),
}
SHAPES = {
    "signal": Shape("signal", (40,), 10),
    "digits": Shape("image", (1, 8, 8), 10),
    "image": Shape("image", (1, 28, 28), 10),
    "text": Shape("text", (12,), 20),
}


def sample(shape: Shape, batch: int = 3) -> torch.Tensor:
    if shape.kind == "text":
        return torch.randint(shape.classes, (batch, *shape.size))
    return torch.randn(batch, *shape.size)


def build(model: str, shape: Shape, seed: int = 0, width: int = 16) -> nn.Module:
    return networks.build(model, shape, width, 2, False, "relu", torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model", MODELS)
def test_every_network_fits_its_data(model: str):
    for kind, shape in SHAPES.items():
        if (kind == "text") != (model in TEXT) and model != "gru":
            with pytest.raises(InputError, match="are for text"):
                build(model, shape)
            continue
        expected = (3, *shape.size, shape.classes) if kind == "text" else (3, shape.classes)
        assert build(model, shape)(sample(shape)).shape == expected


@pytest.mark.parametrize("model", MODELS)
def test_weights_come_from_the_generator_alone(model: str):
    shape = SHAPES["text" if model in TEXT else "digits"]
    before = torch.get_rng_state()
    first, again, other = build(model, shape), build(model, shape), build(model, shape, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("model", SEEDED)
def test_seeded_numbers_stay(model: str):
    """Where modules stand and are called places initial weights and noise: stored runs depend on that."""
    shape, source = SHAPES["text" if model in TEXT else "digits"], torch.Generator().manual_seed(2)
    text = shape.kind == "text"
    x = torch.randn(4, *shape.size, generator=source, dtype=torch.float64) if not text else None
    x = torch.randint(shape.classes, (4, *shape.size), generator=source) if x is None else x
    targets = torch.randint(shape.classes, (4, *shape.size) if text else (4,), generator=source)

    def loss_fn(out: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(out.flatten(0, -2), t.flatten(), reduction="none")
        return each.reshape(4, -1).mean(1)

    network, noise = build(model, shape).double().eval(), torch.Generator().manual_seed(3)
    est = gg.estimate(network, gg.WPerp(k=3), loss_fn, x, targets, generator=noise)
    length = torch.stack([g.square().sum() for g in est.grads.values()]).sum().sqrt()
    assert (float(est.loss), float(length)) == pytest.approx(SEEDED[model], rel=1e-7)


def test_the_mlp_takes_the_numbers_of_its_generator_as_they_come():
    """So stored runs are found again: uniform between ±1/√inputs, layer by layer."""
    generator = torch.Generator().manual_seed(1)
    for ours in build("mlp", SHAPES["signal"], seed=1, width=256).parameters():
        bound = 1 / math.sqrt(ours.shape[1])
        assert torch.equal(ours, torch.empty_like(ours).uniform_(-bound, bound, generator=generator))


@pytest.mark.parametrize("name", TEXT)
def test_transformers_of_text_do_not_look_ahead(name: str):
    shape = SHAPES["text"]
    model, x = build(name, shape, width=128), sample(shape)
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % shape.classes
    torch.testing.assert_close(model(x)[:, :6], model(changed)[:, :6])
    assert not torch.equal(model(x)[:, 6:], model(changed)[:, 6:])


@pytest.mark.parametrize("sites", ["auto", "leaf", 2])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_tangents_pass_large_transformers(name: str, sites: str | int):
    """Groups of heads, rotated positions and gates: the derivative along the directions is that of backpropagation."""
    shape = SHAPES["text"]
    model, x = build(name, shape, width=128).double(), sample(shape)
    targets = torch.randint(shape.classes, x.shape)

    def loss_fn(out: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.mT, t, reduction="none").mean(1)

    true = gg.estimate(model, gg.Backprop(), loss_fn, x, targets, sites=sites).site_grads
    est = gg.estimate(model, gg.WPerp(k=3), loss_fn, x, targets, sites=sites)
    along = [(y[0] * true[site]).flatten(1).sum(1) for site, y in est.directions.items()]
    torch.testing.assert_close(est.jvp[0], torch.stack(along).sum(0))


def test_llama_sees_how_far_apart_tokens_are():
    """Keys and queries that both move on by as many places meet as before."""
    layer = Rotary(128, 12)
    q, k = torch.randn(2, 1, 2, 1, 64).expand(2, 1, 2, 12, 64)
    met = layer.turned(q) @ layer.turned(k).mT
    torch.testing.assert_close(met[..., 3:, 3:], met[..., :-3, :-3])
    assert layer.project_in.out_features == 128 + 2 * 64
