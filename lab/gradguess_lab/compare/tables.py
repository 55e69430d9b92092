"""From the record of a comparison to a section of the page for every task: a table, and what each method costs."""

from __future__ import annotations

import math
from typing import Any

from gradguess_lab.methods import method_label, style_name
from gradguess_lab.report.sections import Section
from gradguess_lab.tables.figure import Figure, with_bars
from gradguess_lab.tables.table import Cell, Table
from gradguess_lab.tables.verdicts import Summary

COSTS = {"ratio": "time", "memory_ratio": "memory"}  # a cost of a row, and what it is called
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of costs over backpropagation's


def compared(record: dict[str, Any]) -> list[Section]:
    """Every task, in the order of the record."""
    sections = []
    for task in record["tasks"]:
        figures = tuple(figure for cost in COSTS if (figure := cost_figure(task, cost)).curves)
        sections.append(Section(task["name"], task["title"], setting(task), (task_table(task),), figures))
    return sections


def task_table(task: dict[str, Any]) -> Table:
    """One line for each method, controls at the end."""
    base = Summary.of(next((row["test"] for row in task["rows"] if row["method"] == "backprop"), []))
    rows = []
    for row in task["rows"]:
        label, test = method_label(row["method"]) + " (control)" * row["control"], Summary.of(row["test"])
        rows.append({
            "Method": Cell(label, label, note=row["failed"].partition(". ")[0].rstrip(".")),
            "Rate": row["lr"],
            "Train": Summary.of(row["train"]),
            "Test": test,
            "Difference": test.mean - base.mean if test and base and row["method"] != "backprop" else None,
            "Time": row.get("ratio"),
            "Memory": row.get("memory_ratio"),
            "Cosine": row.get("cosine"),
            "Sent back": row["sends"] or "–",
            "Seeds": Cell(str(n := len(row["test"])), n, note=f"{row['diverged']} diverged" * bool(row["diverged"])),
        })  # fmt: skip
    caption = (
        f"{setting(task)} Mean ± standard deviation over seeds; the difference is to backpropagation's test result. "
        "Time and peak memory of a training step over backpropagation's, timed in turns in one process. Cosine with "
        f"the true gradient: of the parameters below the lowest cut of {task['pieces']} pieces, at the end of the "
        "first seed's run. Sent back: through how much of the network a signal travels from the loss."
    )
    return Table(f"compare-{task['name']}", task["title"], rows, caption, forms={"Memory": ".2f", "Cosine": ".2f"})


def setting(task: dict[str, Any]) -> str:
    """What was run, on what, and which learning rates were tried."""
    config, grid = task["config"], task["grid"]
    what = "Bits per character (less is better)" if task["quantity"] == "bits" else "Accuracy"
    part = f", {config['samples']} samples" if config["samples"] else ""
    seeds = max(len(row["test"]) for row in task["rows"])
    chosen = [row["lr"] for row in task["rows"] if row["lr"] is not None]
    edge = sum(rate in (min(grid), max(grid)) for rate in chosen)
    return (
        f"{what}. Width {config['width']}, depth {config['depth']}, {config['epochs']} epochs{part}, batches of "
        f"{config['batch']}, {seeds} seeds, on {task['environment']['device']}. Learning rates out of "
        f"{', '.join(f'{rate:g}' for rate in grid)}, chosen after {task['short']} epochs with another seed; {edge} of "
        f"{len(chosen)} lie at the edge of the grid, beyond which a better one may lie."
    )


def cost_figure(task: dict[str, Any], cost: str) -> Figure:
    """The result of each method over what it costs."""
    curves = []
    for row in task["rows"]:
        found = Summary.of(row["test"])
        if row.get(cost) is not None and found and math.isfinite(found.mean):
            label, style = method_label(row["method"]), style_name(row["method"])
            curves.append(with_bars(label, style, {row[cost]: found}, hollow=row["control"]))
    quantity, name, xs = task["quantity"], COSTS[cost], [curve.x[0] for curve in curves]
    return Figure(
        f"compare-{task['name']}-{name}",
        f"Test {quantity} over {name}",
        f"{name} of a step over backpropagation's",
        f"Test {quantity}",
        curves,
        f"{task['title']}: one point for each method, bars are standard deviations. Hollow: controls.",
        [tick for tick in TICKS if xs and 0.8 * min(xs) <= tick <= 1.25 * max(xs)],
        x_scale="log",
    )
