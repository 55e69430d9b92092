"""The paper's guesses on networks that another method has trained: which network did the paper measure them on?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import BIAS_VARIANCE, LAYER_SITES, Published
from gradguess_lab.tables.compare import DIFFERS, HOLDS, Summary, kind_of, within
from gradguess_lab.tables.lines import quantity_cell
from gradguess_lab.tables.runs import Run, Variant, select
from gradguess_lab.tables.table import Cell, Table, text

TRAINED = {"wt": None, "wperp-bottom": 10, "wperp": 10, "backprop": None}
ENTRIES = tuple(entry for entry in BIAS_VARIANCE if entry.quantity in ("variance", "bias"))
BATCHES = {"": "first 512", "last_": "last batch"}


def networks_table(runs: Sequence[Run]) -> Table | None:
    """A row for each published number, network and batch, a column for each epoch; None where nothing was measured."""
    networks = {name: found[0] for name, k in TRAINED.items() if (found := _diagnosed(runs, name, k))}
    epochs = sorted({row["epoch"] for one in networks.values() for run in one.runs for row in run.diagnostics})
    rows = [
        row
        for entry in ENTRIES
        for name, variant in networks.items()
        for batch in BATCHES
        if (row := _row(entry, name, variant, batch, epochs))
    ]
    if not rows:
        return None
    return Table(
        "networks",
        "The same guesses on networks that others have trained",
        ("Guess", "Quantity", "Paper", "Trained with", "Batch", *(f"Epoch {epoch}" for epoch in epochs)),
        tuple(rows),
        "Layer 1, width 128, means over the seeds. Coloured: whether the paper's number lies in the prediction interval"
        " of one run. The paper does not say of which network and which epoch its numbers are.",
        folded=True,
    )


def _diagnosed(runs: Sequence[Run], method: str, k: int | None) -> list[Variant]:
    return [v for v in select(runs, method, 128, k) if any(run.diagnostics for run in v.runs)]


def _row(entry: Published, name: str, variant: Variant, batch: str, epochs: Sequence[int]) -> tuple[Cell, ...] | None:
    found = [Summary.of([v for run in variant.runs if (v := _value(run, entry, batch, epoch))]) for epoch in epochs]
    if not any(found):
        return None
    kind = kind_of(entry.quantity)
    return (
        text(method_label(entry.method)),
        text(kind.name),
        quantity_cell(entry.value, kind),
        text(method_label(name)),
        text(BATCHES[batch]),
        *(_cell(entry, ours) for ours in found),
    )


def _cell(entry: Published, ours: Summary | None) -> Cell:
    if ours is None:
        return Cell("–")
    verdict = {True: HOLDS, False: DIFFERS, None: None}[within(entry.value, entry.rounding, ours)]
    shown = quantity_cell(ours.mean, kind_of(entry.quantity))
    return Cell(shown.text, ours.mean, verdict)


def _value(run: Run, entry: Published, batch: str, epoch: int) -> float | None:
    """The quantity of the entry's guess on the network of the run after an epoch."""
    row: Any = next((row for row in run.diagnostics if row["epoch"] == epoch), {})
    site = LAYER_SITES[entry.layer or 1]
    if run.method == entry.method:
        return row.get("last_batch" if batch else "sites", {}).get(site, {}).get(entry.quantity)
    return row.get("others", {}).get(entry.method, {}).get(site, {}).get(batch + entry.quantity)
