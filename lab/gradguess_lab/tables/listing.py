"""What was run, and where: every run whether the paper has a counterpart or not, every environment, every curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradguess_lab.tables.figure import Figure, means
from gradguess_lab.tables.runs import Group, Run, groups
from gradguess_lab.tables.table import Table, slugify

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


def environments_table(runs: Sequence[Run]) -> Table:
    """Where the runs took place, each place once."""

    def said(value: Any, name: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "–" if value is None else str(value)[: 10 if name == "commit" else None]

    places = Counter(tuple(said(run["environment"].get(name), name) for name in _ENVIRONMENT) for run in runs)
    rows = [dict(zip(_ENVIRONMENT.values(), place, strict=True)) | {"Runs": n} for place, n in places.most_common()]
    return Table("environments", "Environments", rows, "One line for each environment that was recorded.")


def training_figures(runs: Sequence[Run]) -> list[Figure]:
    """Loss and accuracy over the epochs, figures for each task and shape of network."""
    shapes: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run["history"] and not run["script"]:
            shapes.setdefault(tuple(run[name] for name in ("data", "model", "depth", "width")), []).append(run)
    figures = []
    for shape in sorted(shapes, key=lambda shape: (str(shape[:2]), *shape[2:])):
        found = sorted(groups(shapes[shape]), key=lambda one: (one.rank, one.label, one.way))
        more = f" {len(found) - MAX_CURVES} more experiments are left out." if len(found) > MAX_CURVES else ""
        for quantity, title in _TRAINING.items():
            curves = []
            for group in found[:MAX_CURVES]:
                k = group["k"] if group["method"] == "wperp" else 10  # W⊥ has a shade for every k that the paper tries
                style = group["method"] if k == 10 else f"wperp-{k}"
                label = f"{group.label} ({group.way})" if group.way else group.label
                if history := group.history(quantity):
                    curves.append(means(label, style, history))
            data, model, depth, width = shape
            words = (f"{data}, {model}, depth {depth}, width {width}", "Epoch", title)
            caption = f"Mean over the seeds with their range.{more}"
            figures.append(Figure(slugify(f"training {' '.join(map(str, shape))} {quantity}"), *words, curves, caption))
    return [figure for figure in figures if figure.curves]
