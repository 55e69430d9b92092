"""W⊥ with each sample's own subspace, as the paper defines it, beside W⊥ with one basis for the batch."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.averages import mean_cell
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run, Variant, select
from gradguess_lab.tables.sides import show_interval
from gradguess_lab.tables.table import Cell, Table, number, text
from gradguess_lab.tables.welch import difference

_QUANTITIES = {"train_accuracy": "Train accuracy", "test_accuracy": "Test accuracy"}


def solvers_table(runs: Sequence[Run]) -> Table | None:
    """A row for every width, k and accuracy for which both were run; None where there is none."""
    rows = [row for width in WIDTHS for k in (1, 10, 25, "rank") for row in _rows(runs, width, k)]
    if not rows:
        return None
    return Table(
        "solvers",
        "Each sample's own subspace, and the shared basis",
        ("Width", "k", "Quantity", "Own subspace", "Shared basis", "Difference", "Seeds"),
        tuple(rows),
        "Difference: shared less own, with its 95 % interval by Welch; with one seed on either side there is none. "
        "Seeds: of own and of shared.",
    )


def _rows(runs: Sequence[Run], width: int, k: int | str) -> list[tuple[Cell, ...]]:
    found = select(runs, "wperp", width, k)
    own = next((variant for variant in found if variant.by_definition), None)
    shared = next((variant for variant in found if not variant.by_definition), None)
    if own is None or shared is None:
        return []
    return [_row(width, k, quantity, own, shared) for quantity in _QUANTITIES]


def _row(width: int, k: int | str, quantity: str, own: Variant, shared: Variant) -> tuple[Cell, ...]:
    a, b = (Summary.of(variant.values(quantity)) for variant in (own, shared))
    if a is None or b is None:
        return (number(width, "d"), text(k), text(_QUANTITIES[quantity]), *(Cell("–") for _ in range(4)))
    gap = difference(a, b)
    return (
        number(width, "d"),
        text(k),
        text(_QUANTITIES[quantity]),
        mean_cell(a),
        mean_cell(b),
        Cell(show_interval(gap), gap.value) if gap else number(b.mean - a.mean, signed=True),
        text(f"{a.n}, {b.n}"),
    )
