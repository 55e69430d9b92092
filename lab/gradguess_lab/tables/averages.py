"""Cells and curves over the seeds of an experiment: the mean, with its standard deviation or its range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Variant
from gradguess_lab.tables.table import Cell, Curve, mean_text


def mean_cell(summary: Summary | None) -> Cell:
    """The mean with its standard deviation; a dash where nothing was run."""
    return Cell("–") if summary is None else Cell(mean_text(summary.mean, summary.sd), summary.mean)


def curve_of_means(label: str, points: Sequence[tuple[float, Summary]], style: str) -> Curve | None:
    """The means at these x with bars of one standard deviation; None without points."""
    if not points:
        return None
    return Curve(
        label,
        [float(x) for x, _ in points],
        [summary.mean for _, summary in points],
        style,
        low=[summary.mean - (summary.sd or 0.0) for _, summary in points],
        high=[summary.mean + (summary.sd or 0.0) for _, summary in points],
        markers=True,
        error_bars=True,
    )


def epoch_curve(variant: Variant, quantity: str, label: str, style: str, dashed: bool = False) -> Curve | None:
    """The mean of a quantity over the epochs with the range of the seeds; None if no run logged it."""
    by_epoch: dict[float, list[float]] = {}
    for run in variant.runs:
        for row in run.history:
            if quantity in row:
                by_epoch.setdefault(row["epoch"], []).append(row[quantity])
    if not by_epoch:
        return None
    epochs = sorted(by_epoch)
    many = len(variant.runs) > 1
    return Curve(
        label,
        epochs,
        [statistics.fmean(by_epoch[epoch]) for epoch in epochs],
        style,
        low=[min(by_epoch[epoch]) for epoch in epochs] if many else None,
        high=[max(by_epoch[epoch]) for epoch in epochs] if many else None,
        dashed=dashed,
    )
