"""What was run, and where: every run whether the paper has a counterpart or not, and every environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradguess_lab.tables.runs import Run, Variant, command, variants
from gradguess_lab.tables.table import Cell, Table, constant, number, text

_SETTING = ("Method", "Data", "Model", "Width", "Depth", "Epochs", "Seed", "Device")
_METRICS = {
    "train_accuracy": ("Train acc.", ".3f"),
    "test_accuracy": ("Test acc.", ".3f"),
    "train_loss": ("Train loss", ".3f"),
    "step_ms": ("Step, ms", ".2f"),
    "peak_memory_mb": ("Memory, MB", ".0f"),
}
_ENVIRONMENT = {
    "gradguess": "gradguess",
    "torch": "PyTorch",
    "python": "Python",
    "device": "Device",
    "threads": "Threads",
    "platform": "Platform",
    "commit": "Commit",
    "clean": "As committed",
}


def runs_table(runs: Sequence[Run]) -> Table:
    """One line for each run."""
    columns = ("Run", *_SETTING, *(title for title, _ in _METRICS.values()))
    rows = tuple(_row(run) for run in runs)
    return Table(
        "runs",
        "All results that were found",
        columns,
        rows,
        "What all of them have in common is not shown. Step: mean time of one optimisation step.",
        tuple(_command(variant) for variant in variants(runs)),
        hidden=constant(columns, rows, _SETTING),
    )


def _command(variant: Variant) -> tuple[str, str]:
    """How to get all runs of an experiment: they differ in the seed."""
    seeds = ", ".join(str(run.config.get("seed")) for run in variant.runs)
    config = {name: value for name, value in variant.first.config.items() if name != "seed"}
    by = f" ({variant.label})" if variant.label else ""
    return f"{variant.first.label}{by}, seeds {seeds}", command({**config, "seed": "SEED"})


def _row(run: Run) -> tuple[Cell, ...]:
    return (
        text(run.key),
        text(run.label),
        *(_setting(run.config.get(name.lower())) for name in _SETTING[1:]),
        *(number(run.metrics.get(name), form) for name, (_, form) in _METRICS.items()),
    )


def _setting(value: object) -> Cell:
    return number(value, "d") if isinstance(value, int) else text("–" if value is None else value)


def environments_table(runs: Sequence[Run]) -> Table:
    """Where the runs took place, each place once."""
    places = Counter(tuple(_place(run, name) for name in _ENVIRONMENT) for run in runs)
    rows = [(*(text(part) for part in place), number(count, "d")) for place, count in places.most_common()]
    caption = "One line for each environment that was recorded."
    return Table("environments", "Environments", (*_ENVIRONMENT.values(), "Runs"), tuple(rows), caption)


def _place(run: Run, name: str) -> str:
    value = run.environment.get(name)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)[:10] if name == "commit" else str(value)
