"""The coverage table: every layer through every guess is what docs/coverage.md says, and that is right or refused."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from combinations import each
from coverage_layers import LAYERS, make
from coverage_outcome import COLUMNS, REFUSED, RIGHT, outcome
from models import cross_entropy, generator
from write_table import HEAD, PAGE, TAIL, read

TABLE = read(PAGE.read_text())


def test_the_page_has_every_layer_and_nothing_else():
    assert TABLE.keys() == LAYERS.keys()
    for layer, (refused, note) in TABLE.items():
        assert note == LAYERS[layer].note
        assert refused <= set(COLUMNS)
    assert PAGE.read_text().startswith(HEAD)
    assert PAGE.read_text().endswith(TAIL)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("layer", LAYERS)
def test_cell(layer: str, column: str):
    assert outcome(layer, column) == (REFUSED if column in TABLE[layer][0] else RIGHT)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("CTC loss", "loss_fn"),
        ("autograd.Function without jvp", r"layer \(Calls\)"),
        ("EmbeddingBag", r"0 \(EmbeddingBag\)"),
        ("weight_norm", r"layer\.parametrizations\.weight"),
    ],
)
def test_a_refusal_names_the_culprit(layer: str, name: str):
    case = make(layer)
    with pytest.raises(gg.ForwardModeError, match=f"^{name}"):
        gg.estimate(case.model, gg.WeightPerturbation(), *case.args)


def test_a_frozen_layer_without_formula_may_stay_below_the_first_site():
    case = make("EmbeddingBag")
    case.model[0].requires_grad_(False)
    est = gg.estimate(case.model, gg.WeightPerturbation(), *case.args, generator=generator())
    assert est.jvp.abs().max() > 0


MIXED = ["Linear", "Conv2d, strided", "LayerNorm", "GroupNorm", "TransformerEncoderLayer, evaluation"]


@pytest.mark.parametrize(("layer", "guess"), each(MIXED, [gg.ActivationPerturbation(), gg.WTranspose(), gg.WPerp(k=3)]))
def test_mixed_precision(layer: str, guess: gg.Guess):
    case = make(layer)
    model, x = case.model.float(), case.inputs.float()
    with torch.autocast("cpu", torch.bfloat16):
        est = gg.estimate(model, guess, cross_entropy, x, case.targets, sites="leaf", generator=generator())
        truth = gg.estimate(model, gg.Backprop(), cross_entropy, x, case.targets, sites="leaf")
    expected = sum((est.directions[name].float() * g.float()).flatten(2).sum(2) for name, g in truth.site_grads.items())
    assert (est.jvp.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(torch.isfinite(grad).all() for grad in est.grads.values())
