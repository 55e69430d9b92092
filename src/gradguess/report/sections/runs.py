"""Every run, whether the paper has a counterpart or not."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Cell, Run, Table, command, number, text
from gradguess.report.section import Section

__all__ = ["all_runs"]

_COLUMNS = ("Run", "Method", "Data", "Width", "Depth", "Epochs", "Seed", "Device")
_METRICS = {
    "train_accuracy": ("Train acc.", ".3f"),
    "test_accuracy": ("Test acc.", ".3f"),
    "train_loss": ("Train loss", ".3f"),
    "step_ms": ("Step, ms", ".2f"),
    "peak_memory_mb": ("Memory, MB", ".0f"),
}


def all_runs(runs: Sequence[Run]) -> Section:
    table = Table(
        "runs",
        "Every run",
        _COLUMNS + tuple(title for title, _ in _METRICS.values()),
        tuple(_row(run) for run in runs),
        "All results that were found. Step is the mean time of one optimisation step.",
        tuple((run.key, command(run.config)) for run in runs),
    )
    return Section("runs", "Every run", tables=(table,))


def _row(run: Run) -> tuple[Cell, ...]:
    config = run.config
    return (
        text(run.key),
        text(run.label),
        text(config.get("data", "–")),
        *(_whole(config.get(name)) for name in ("width", "depth", "epochs", "seed")),
        text(config.get("device", "–")),
        *(number(run.metrics.get(name), form) for name, (_, form) in _METRICS.items()),
    )


def _whole(value: object) -> Cell:
    return number(value, "d") if isinstance(value, int) else text("–" if value is None else value)
