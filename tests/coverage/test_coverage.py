"""The coverage table: every layer through every guess is what docs/coverage.md says, and that is right or refused."""

from __future__ import annotations

import pytest

import gradguess as gg
from coverage_layers import LAYERS, make
from coverage_outcome import COLUMNS, REFUSED, RIGHT, outcome
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
