"""From the record of a comparison to tables and figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradguess_lab.methods import method_label, style_name
from gradguess_lab.tables.averages import mean_cell
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.table import Cell, Curve, Figure, Table, number, text

COLUMNS = (
    *("Method", "Rate", "Train", "Test", "Difference"),
    *("Time", "Memory", "Cosine", "Sent back", "Seeds"),
)
COSTS = {"ratio": "time", "memory_ratio": "memory"}  # a cost of a row, and what it is called
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of costs over backpropagation's
BASE = "backprop"


@dataclass(frozen=True)
class Compared:
    """A task of the record with its tables and figures."""

    name: str
    title: str
    setting: str
    table: Table
    figures: tuple[Figure, ...]


def compared(record: dict[str, Any]) -> list[Compared]:
    """Every task, in the order of the record."""
    return [
        Compared(
            task["name"],
            task["title"],
            setting(task),
            task_table(task),
            tuple(f for cost in COSTS if (f := figure(task, cost)) is not None),
        )
        for task in record["tasks"]
    ]


def task_table(task: dict[str, Any]) -> Table:
    """One line for each method, controls at the end."""
    base = Summary.of(next((row["test"] for row in task["rows"] if row["method"] == BASE), []))
    rows = tuple(_line(row, base) for row in task["rows"])
    caption = (
        f"{setting(task)} Mean ± standard deviation over seeds; the difference is to backpropagation's test result. "
        "Time and peak memory of a training step over backpropagation's, timed in turns in one process. Cosine with "
        f"the true gradient: of the parameters below the lowest cut of {task['pieces']} pieces, at the end of the "
        "first seed's run. Sent back: through how much of the network a signal travels from the loss."
    )
    return Table(f"compare-{task['name']}", task["title"], COLUMNS, rows, caption)


def setting(task: dict[str, Any]) -> str:
    """What was run, on what, and which learning rates were tried."""
    config = task["config"]
    what = "Bits per character (less is better)" if task["quantity"] == "bits" else "Accuracy"
    tried = ", ".join(f"{rate:g}" for rate in task["grid"])
    chosen = f"chosen by the test set after {task['short']} epochs with another seed, for all methods alike"
    rates = f"Learning rates out of {tried}, {chosen}. {_edge(task)}" if len(task["grid"]) > 1 else f"Rate {tried}."
    part = f", {config['samples']} samples" if config["samples"] else ""
    seeds = max(len(row["test"]) for row in task["rows"])
    return (
        f"{what}. Width {config['width']}, depth {config['depth']}, {config['epochs']} epochs{part}, batches of "
        f"{config['batch']}, {seeds} seeds, on {task['environment']['device']}. {rates}"
    )


def _edge(task: dict[str, Any]) -> str:
    """How many methods might do better with a rate beyond the grid."""
    chosen = [row["lr"] for row in task["rows"] if row["lr"] is not None]
    edge = sum(rate in (min(task["grid"]), max(task["grid"])) for rate in chosen)
    return f"{edge} of {len(chosen)} rates lie at the edge of the grid: which rate is best is not known there."


def _line(row: dict[str, Any], base: Summary | None) -> tuple[Cell, ...]:
    test = Summary.of(row["test"])
    against = Cell("–")
    if test is not None and base is not None and row["method"] != BASE:
        against = number(test.mean - base.mean, signed=True)
    seeds = number(len(row["test"]), "d")
    if row["diverged"]:
        seeds = Cell(seeds.text, seeds.value, note=f"{row['diverged']} diverged")
    label = method_label(row["method"]) + (" (control)" if row["control"] else "")
    return (
        Cell(label, label, note=_why(row)),
        Cell("–") if row["lr"] is None else Cell(f"{row['lr']:g}", row["lr"]),
        mean_cell(Summary.of(row["train"])),
        mean_cell(test),
        against,
        number(row.get("ratio"), ".2f"),
        number(row.get("memory_ratio"), ".2f"),
        number(row.get("cosine"), ".2f"),
        text(row["sends"] or "–"),
        seeds,
    )


def _why(row: dict[str, Any]) -> str:
    """Why there is no result, in short."""
    return row["failed"].partition(". ")[0].rstrip(".")


def figure(task: dict[str, Any], cost: str) -> Figure | None:
    """The result of each method over what it costs; None where no cost was measured."""
    known = [row for row in task["rows"] if row.get(cost) is not None and row["test"]]
    curves = [curve for row in known if (curve := _point(row, cost)) is not None]
    if not curves:
        return None
    quantity, name, xs = task["quantity"], COSTS[cost], [curve.x[0] for curve in curves]
    return Figure(
        slug=f"compare-{task['name']}-{name}",
        title=f"Test {quantity} over {name}",
        x_label=f"{name} of a step over backpropagation's",
        y_label=f"Test {quantity}",
        curves=tuple(curves),
        caption=f"{task['title']}: one point for each method, bars are standard deviations. Hollow: controls.",
        x_ticks=tuple(tick for tick in TICKS if 0.8 * min(xs) <= tick <= 1.25 * max(xs)),
        log_x=True,
    )


def _point(row: dict[str, Any], cost: str) -> Curve | None:
    found = Summary.of(row["test"])
    if found is None or not math.isfinite(found.mean):
        return None
    sd = found.sd or 0.0
    return Curve(
        method_label(row["method"]),
        [row[cost]],
        [found.mean],
        style_name(row["method"]),
        low=[found.mean - sd],
        high=[found.mean + sd],
        dashed=row["control"],
        markers=True,
        error_bars=True,
    )
