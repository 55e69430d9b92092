"""From results on streams to a page of tables in Markdown, and to figures of error and memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.streams.plan import Group, reported
from gradguess_lab.streams.tasks import UNITS
from gradguess_lab.tables.table import Curve, Figure, slugify

SOLVED = 0.01
STYLES = {  # colours of the report, by rule
    "rtrl": "backprop",
    "wperp": "wperp",
    "wperp-snap": "layer-2",
    "tbptt": "layer-1",
    "snap": "layer-3",
    "uoro": "weight",
    "rflo": "wt",
    "eprop": "activation",
}
TITLES = {
    "price": "Time and memory of a step",
    "recall12": "Recall of 12 steps, 64 units",
    "recall40": "Recall of 40 steps, 128 units",
    "chaos": "Hénon and Lorenz, 64 units",
    "sensor": "A sensor that drifts, 32 units",
    "balancing": "Influence balancing",
    "copy40": "Copy with a delay of 40",
    "tmaze40": "T-maze with a corridor of 40",
    "characters": "Characters of Shakespeare",
    "million": "A million steps",
}


def page(out: Path, groups: Mapping[str, Group]) -> str:
    """All tables for which there are results, one below the other."""
    parts = ["# Streams: results", ""]
    for name, group in groups.items():
        lines = table(out, group)
        if lines:
            parts += [f"## {TITLES[name]}", "", *lines, ""]
    return "\n".join(parts)


def table(out: Path, group: Group, *columns: str) -> list[str]:
    """A Markdown table of a group: a line for each entry that has been run, with all columns or those named."""
    lines = []
    for entry in group.entries:
        if found := reported(out, group, entry):
            lines.append(_line(entry, found[0]["config"]["lr"], found))
    head = columns or tuple(lines[0]) if lines else ()
    rows = [_row(line[name] for name in head) for line in lines]
    return [_row(head), _row(["---"] * len(head)), *rows] if lines else []


def named(entry: StreamConfig) -> str:
    """The rule of an entry in words."""
    if entry.rule in ("wperp", "wperp-snap"):
        return f"{entry.rule}, {entry.basis}, k = {entry.k}"
    if entry.rule == "wperp-blocks":
        return f"wperp-blocks({entry.refresh}), {entry.basis}, k = {entry.k}"
    return f"tbptt({entry.truncation})" if entry.rule == "tbptt" else entry.rule


def _line(entry: StreamConfig, rate: float | None, found: list[dict[str, Any]]) -> dict[str, str]:
    errors, kept = [record["error"] for record in found if record["error"] is not None], found[0]["memory_mb"]
    spread = f"{_mean(errors):.4f} ({min(errors):.4f} to {max(errors):.4f})" if errors else "none"
    if len(errors) < len(found):
        spread += f"; {len(found) - len(errors)} diverged"
    below = sum(error < SOLVED for error in errors)
    network = f"{UNITS} linear units" if entry.task == "balancing" else f"{entry.cell} {entry.width}"
    parts = [entry.task, network, entry.device]
    parts += [f"{entry.streams} streams"] if entry.streams != StreamConfig.streams else []
    parts += [f"stopped at {entry.stop}"] if entry.stop else []
    process = [point["process_mb"] for point in (found[0]["curve"][:1] + found[0]["curve"][-1:])]
    times = [record["step_ms"] for record in found if record["step_ms"] is not None]
    return {
        "task": ", ".join(parts),
        "rule": named(entry),
        "rate": f"{rate:g}",
        "error: mean (least to most)": spread,
        f"below {SOLVED}": f"{below} of {len(found)}",
        "ms a step": f"{_mean(times):.2f}" if times else "",
        "MB kept": f"{kept:.3g}" if kept < 1000 else f"{kept:,.0f}",
        "MB, process": " → ".join(f"{value:.0f}" for value in process if value is not None),
    }


def figures(out: Path, name: str, group: Group) -> list[Figure]:
    """Error over time and memory over time of the first seed of each entry, other bases of W⊥ left out."""
    first = []
    for entry in (entry for entry in group.entries if entry.basis == StreamConfig.basis):
        first += [(entry, row) for row in reported(out, group, entry)[:1]]
    return [
        Figure(
            slug=slugify(f"streams {name} {what}"),
            title=f"{TITLES[name]}: {label}",
            x_label="step",
            y_label=label,
            log_y=what == "error",
            curves=tuple(_curve(entry, record, what) for entry, record in first),
        )
        for what, label in (("error", "error"), ("process_mb", "memory of the process, MB"))
        if first
    ]


def _curve(entry: StreamConfig, record: dict[str, Any], what: str) -> Curve:
    points = [(point["step"], point[what]) for point in record["curve"] if point[what] is not None]
    style = STYLES.get(entry.rule, entry.rule)
    return Curve(named(entry), tuple(x for x, _ in points), tuple(y for _, y in points), style)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
