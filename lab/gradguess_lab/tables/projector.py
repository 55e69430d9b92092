"""How far each way to find W⊥ is from its definition (`scripts/projector_error.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from gradguess_lab.tables.table import Cell, Table, number, text

_NAMES = {
    "subspace": "own subspace",
    "shared": "shared basis",
    "ns, nearest": "W⊥-NS, nearest set",
    "ns, placed": "W⊥-NS, threshold placed",
}


def projector_table(records: Sequence[dict[str, Any]]) -> Table | None:
    """A row for every width, guess and layer, on first and on trained weights; None where nothing was measured."""
    rows = [row for record in records if record["kind"] == "projector" for row in record["rows"]]
    if not rows:
        return None
    widths = sorted({row["width"] for row in rows})
    layers = sorted({row["layer"] for row in rows})
    made = [_row(rows, width, guess, layer) for width in widths for guess in _NAMES for layer in layers]
    return Table(
        "projector",
        "Projector error",
        ("Width", "Guess", "Layer", "First weights", "Worst", "Trained weights", "Worst", "Directions"),
        tuple(row for row in made if row is not None),
        "Spectral norm of the difference to the projector on the sample's own top ten directions: median and worst "
        "over samples and seeds. Directions: the mean trace of the covariance on trained weights.",
    )


def _row(rows: Sequence[dict[str, Any]], width: int, guess: str, layer: int) -> tuple[Cell, ...] | None:
    mine = [row for row in rows if (row["width"], row["guess"], row["layer"]) == (width, guess, layer)]
    first, trained = ([row for row in mine if (row["epoch"] == 0) == at_start] for at_start in (True, False))
    if not first or not trained:
        return None
    cells = [number(width, "d"), text(_NAMES[guess]), number(layer, "d")]
    for part in (first, trained):
        middle, worst = median(row["median"] for row in part), max(row["worst"] for row in part)
        cells += [number(middle, ".2g"), number(worst, ".2g")]
    passed = sum(row["directions"] for row in trained) / len(trained)
    return (*cells, number(passed, ".1f"))
