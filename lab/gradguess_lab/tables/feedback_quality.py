"""How well one step's estimate points along the true gradient, early in training and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.paper_numbers import LAYER_SITES
from gradguess_lab.plans import configs
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.feedback_results import Result, results_of
from gradguess_lab.tables.runs import Run, Variant
from gradguess_lab.tables.table import Cell, Table, number, text


def quality_table(runs: Sequence[Run]) -> Table | None:
    """The cosine at every hidden layer; None where no run of learned feedback was diagnosed."""
    looked_at = [run for run in runs if run.diagnostics]
    found = [result for result in results_of(configs("feedback-quality"), looked_at) if result.variant]
    if not any(result.is_taught for result in found):
        return None
    rows = tuple(row for result in found for row in _rows(result))
    columns = ("Method", "Epoch", *(f"Layer {layer}" for layer in LAYER_SITES), "Seeds")
    return Table(
        "feedback-quality",
        "Cosine of one step's estimate with the true gradient",
        columns,
        rows,
        f"Width {found[0].config.width}, means over the seeds, at the first diagnosed epoch after the start and at the "
        "last.",
    )


def _rows(result: Result) -> list[tuple[Cell, ...]]:
    variant = result.variant
    assert variant is not None
    epochs = sorted({row["epoch"] for run in variant.runs for row in run.diagnostics if row["epoch"]})
    return [_row(result.label, variant, epoch) for epoch in dict.fromkeys((epochs[0], epochs[-1]))] if epochs else []


def _row(label: str, variant: Variant, epoch: int) -> tuple[Cell, ...]:
    means = [Summary.of(variant.values("cosine", layer, epoch=epoch)) for layer in LAYER_SITES]
    seeds = max((mean.n for mean in means if mean), default=0)
    cells = (number(mean.mean if mean else None, ".2f") for mean in means)
    return text(label), number(epoch, "d"), *cells, number(seeds, "d")
