"""What was run, and where: every run whether the paper has a counterpart or not, every environment, every curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gradguess_lab.tables.figure import Curve, Figure, means
from gradguess_lab.tables.runs import Group, Run, groups
from gradguess_lab.tables.table import Row, Table, cell, slugify, table

_SETTING = ("Data", "Model", "Width", "Depth", "Epochs", "Seed", "Device")
_METRICS = {
    "train_accuracy": "Train acc.",
    "test_accuracy": "Test acc.",
    "train_loss": "Train loss",
    "step_ms": "Step, ms",
    "peak_memory_mb": "Memory, MB",
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
_TRAINING = {
    "train_loss": "Train loss",
    "test_loss": "Test loss",
    "train_accuracy": "Train accuracy",
    "test_accuracy": "Test accuracy",
}
MAX_CURVES = 12  # a figure with more lines than this cannot be read


def runs_table(runs: Sequence[Run]) -> Table:
    """One line for each run; one command for each experiment, whose runs differ in the seed."""
    rows = [
        {"Run": run["key"], "Method": Group([run]).label}
        | {name: run[name.lower()] for name in _SETTING}
        | {title: run.get(name) for name, title in _METRICS.items()}
        for run in runs
    ]
    commands = {}
    for group in groups(runs):
        seeds = ", ".join(str(run["seed"]) for run in group.runs)
        commands[f"{group.label} ({group.way}), seeds {seeds}"] = group.command
    caption = "What all of them have in common is not shown. Step: mean time of one optimisation step."
    return Table("runs", "All results that were found", rows, caption, _SETTING, commands)


@table("environments", "Environments", "One line for each environment that was recorded.")
def environments_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Where the runs took place, each place once."""
    places = Counter(tuple(cell(run["environment"].get(name)).text for name in _ENVIRONMENT) for run in runs)
    for place, count in places.most_common():
        row = dict(zip(_ENVIRONMENT.values(), place, strict=True))
        yield {**row, "Commit": row["Commit"][:10], "Runs": count}


def training_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Loss and accuracy over the epochs, figures for each task and shape of network."""
    shapes: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run["history"] and not run["script"]:
            shapes.setdefault(tuple(run[name] for name in ("data", "model", "depth", "width")), []).append(run)
    for shape in sorted(shapes, key=lambda shape: (str(shape[:2]), *shape[2:])):
        found = sorted(groups(shapes[shape]), key=lambda one: (one.rank, one.label, one.way))
        more = f" {len(found) - MAX_CURVES} more experiments are left out." if len(found) > MAX_CURVES else ""
        for quantity, title in _TRAINING.items():
            data, model, depth, width = shape
            words = (f"{data}, {model}, depth {depth}, width {width}", "Epoch", title)
            curves = [curve for group in found[:MAX_CURVES] for curve in _curve(group, quantity)]
            caption = f"Mean over the seeds with their range.{more}"
            yield Figure(slugify(f"training {' '.join(map(str, shape))} {quantity}"), *words, curves, caption)


def _curve(group: Group, quantity: str) -> Iterator[Curve]:
    """The quantity after each epoch, over the seeds; nothing where it was not measured."""
    found: dict[float, list[float]] = {}
    for row in (row for run in group.runs for row in run["history"] if row.get(quantity) is not None):
        found.setdefault(row["epoch"], []).append(row[quantity])
    k = group["k"] if group["method"] == "wperp" else 10  # W⊥ has a shade for every k that the paper tries
    label = f"{group.label} ({group.way})" if group.way else group.label
    if found:
        yield means(label, group["method"] if k == 10 else f"wperp-{k}", dict(sorted(found.items())))
