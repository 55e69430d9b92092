"""The coverage table: every layer through every guess is what docs/coverage.md says, and that is right or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from asserts import assert_unbiased
from coverage_layers import LAYERS, make
from coverage_outcome import COLUMNS, REFUSED, RIGHT, outcome
from models import BATCH, CLASSES, INPUTS, cross_entropy, generator
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
        ("autograd.Function without jvp", r"layer \(Functional\)"),
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


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


@pytest.mark.filterwarnings("ignore:Samples mix")
def test_batch_norm_is_unbiased_with_the_derivative_of_the_whole_batch():
    torch.manual_seed(0)
    model, x = norm_net(), torch.randn(BATCH, INPUTS, dtype=torch.float64)
    args = (cross_entropy, x, torch.randint(CLASSES, (BATCH,)))
    truth = gg.estimate(model, gg.Backprop(), *args).grads["0.weight"]
    source = generator(1)

    def samples(coupling: str) -> torch.Tensor:
        return torch.stack(
            [
                gg.estimate(
                    model, gg.ActivationPerturbation(), *args, tangents=50, generator=source, coupling=coupling
                ).grads["0.weight"]
                for _ in range(80)
            ]
        )

    assert_unbiased(samples("batch"), truth)
    alone = samples("sample")
    error = alone.std(0) / len(alone) ** 0.5
    assert ((alone.mean(0) - truth).abs() / error).max() > 10, "the bias that coupling='batch' removes"


def test_running_statistics_are_written_once_per_step():
    torch.manual_seed(0)
    ours, theirs = norm_net(), norm_net()
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(BATCH, INPUTS, dtype=torch.float64), torch.randint(CLASSES, (BATCH,))
    gg.ForwardGradient(ours, gg.Feedback(gg.WPerp(k=3)), tangents=3, coupling="batch")(cross_entropy, x, y)
    theirs(x)
    torch.testing.assert_close(ours[1].running_mean, theirs[1].running_mean)
    assert ours[1].num_batches_tracked == 1


@pytest.mark.parametrize(
    "layer", ["Linear", "Conv2d, strided", "LayerNorm", "GroupNorm", "TransformerEncoderLayer, evaluation"]
)
@pytest.mark.parametrize(
    "guess", [gg.ActivationPerturbation(), gg.WTranspose(), gg.WPerp(k=3)], ids=lambda g: type(g).__name__
)
def test_mixed_precision(layer: str, guess: gg.Guess):
    case = make(layer)
    model, x = case.model.float(), case.inputs.float()
    with torch.autocast("cpu", torch.bfloat16):
        est = gg.estimate(model, guess, cross_entropy, x, case.targets, sites="leaf", generator=generator())
        truth = gg.estimate(model, gg.Backprop(), cross_entropy, x, case.targets, sites="leaf")
    expected = sum((est.directions[name].float() * g.float()).flatten(2).sum(2) for name, g in truth.site_grads.items())
    assert (est.jvp.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(torch.isfinite(grad).all() for grad in est.grads.values())
