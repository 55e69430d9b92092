"""Every run, whether the paper has a counterpart or not."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Cell, Run, Table, command, constant, number, text
from gradguess.report.section import Section

__all__ = ["all_runs"]

_SETTING = ("Method", "Data", "Model", "Width", "Depth", "Epochs", "Seed", "Device")
_METRICS = {
    "train_accuracy": ("Train acc.", ".3f"),
    "test_accuracy": ("Test acc.", ".3f"),
    "train_loss": ("Train loss", ".3f"),
    "step_ms": ("Step, ms", ".2f"),
    "peak_memory_mb": ("Memory, MB", ".0f"),
}


def all_runs(runs: Sequence[Run]) -> Section:
    columns = ("Run", *_SETTING, *(title for title, _ in _METRICS.values()))
    rows = tuple(_row(run) for run in runs)
    table = Table(
        "runs",
        "All results that were found",
        columns,
        rows,
        "What all of them have in common is not shown. Step: mean time of one optimisation step.",
        tuple((run.key, command(run.config)) for run in runs),
        hidden=constant(columns, rows, _SETTING),
    )
    return Section("runs", "Every run", tables=(table,))


def _row(run: Run) -> tuple[Cell, ...]:
    return (
        text(run.key),
        text(run.label),
        *(_setting(run.config.get(name.lower())) for name in _SETTING[1:]),
        *(number(run.metrics.get(name), form) for name, (_, form) in _METRICS.items()),
    )


def _setting(value: object) -> Cell:
    return number(value, "d") if isinstance(value, int) else text("–" if value is None else value)
