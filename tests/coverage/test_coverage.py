"""The coverage table: every layer through every guess is what docs/coverage.md says, and that is right or refused."""

from __future__ import annotations

import pytest

from coverage_layers import LAYERS
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
