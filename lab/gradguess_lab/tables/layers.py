"""Diagnostics of every layer, for every experiment that was diagnosed."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.paper_numbers import LAYER_SITES
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run, Variant, in_paper_setting, variants
from gradguess_lab.tables.table import Cell, Table, number, text

_QUANTITIES = {
    "variance": ("Variance", ".2e"),
    "bias": ("Bias", ".2e"),
    "covariance_norm": ("Cov. norm", ".3f"),
    "cosine": ("Cosine", ".3f"),
    "gradient_norm": ("Gradient norm", ".2e"),
    "rank": ("Rank", ".0f"),
}


def layers_table(runs: Sequence[Run]) -> Table:
    """All layers in the paper's setting, where the paper prints one."""
    found = variants(run for run in runs if run.diagnostics and in_paper_setting(run))
    found.sort(key=lambda variant: (variant.first.config.get("width", 0), variant.first.label, variant.label))
    rows = [_row(variant, layer) for variant in found for layer in LAYER_SITES]
    return Table(
        "layers",
        "Every layer",
        ("Method", "Width", "Computed by", "Layer", *(title for title, _ in _QUANTITIES.values()), "Seeds"),
        tuple(rows),
        "Means over the seeds at the last diagnosed epoch, for every diagnosed run in the paper's setting. The cosine "
        "is that of the estimate with the true gradient.",
        folded=True,
    )


def _row(variant: Variant, layer: int) -> tuple[Cell, ...]:
    return (
        text(variant.first.label),
        number(variant.first.config.get("width"), "d"),
        text(variant.label),
        number(layer, "d"),
        *(_mean(variant.values(name, layer), form) for name, (_, form) in _QUANTITIES.items()),
        number(len(variant.runs), "d"),
    )


def _mean(values: Sequence[float], form: str) -> Cell:
    summary = Summary.of(values)
    return number(summary.mean if summary else None, form)
