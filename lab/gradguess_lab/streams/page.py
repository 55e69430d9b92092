"""From results on streams to tables, a page in Markdown, and figures of error and memory over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.streams.plan import Group, reported
from gradguess_lab.streams.tasks import UNITS
from gradguess_lab.tables.figure import Curve, Figure
from gradguess_lab.tables.table import Table, slugify

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
    tables = [table(out, name, group) for name, group in groups.items()]
    parts = [f"## {one.title}\n\n{one.markdown()}" for one in tables if one.rows]
    return "\n\n".join(["# Streams: results", *parts]) + "\n"


def table(out: Path, name: str, group: Group) -> Table:
    """A line for each entry of a group that has been run."""
    found = [(entry, rows) for entry in group.entries if (rows := reported(out, group, entry))]
    return Table(f"streams-{name}", TITLES[name], [_row(entry, rows) for entry, rows in found])


def named(entry: StreamConfig) -> str:
    """The rule of an entry in words."""
    lengths = {"tbptt": f"({entry.truncation})", "wperp-blocks": f"({entry.refresh})"}
    basis = f", {entry.basis}, k = {entry.k}" if entry.rule.startswith("wperp") else ""
    return entry.rule + lengths.get(entry.rule, "") + basis


def _row(entry: StreamConfig, found: list[dict[str, Any]]) -> dict[str, Any]:
    errors, kept = [record["error"] for record in found if record["error"] is not None], found[0]["memory_mb"]
    spread = f"{fmean(errors):.4f} ({min(errors):.4f} to {max(errors):.4f})" if errors else "none"
    spread += f"; {len(found) - len(errors)} diverged" if len(errors) < len(found) else ""
    parts = [entry.task, f"{UNITS} linear units" if entry.task == "balancing" else f"{entry.cell} {entry.width}"]
    parts += [entry.device, f"{entry.streams} streams" if entry.streams != StreamConfig.streams else ""]
    parts += [f"stopped at {entry.stop}" if entry.stop else ""]
    process = [point["process_mb"] for point in (found[0]["curve"][:1] + found[0]["curve"][-1:])]
    times = [record["step_ms"] for record in found if record["step_ms"] is not None]
    return {
        "task": ", ".join(filter(None, parts)),
        "rule": named(entry),
        "rate": f"{found[0]['config']['lr']:g}",
        "error: mean (least to most)": spread,
        f"below {SOLVED}": f"{sum(error < SOLVED for error in errors)} of {len(found)}",
        "ms a step": f"{fmean(times):.2f}" if times else "",
        "MB kept": f"{kept:.3g}" if kept < 1000 else f"{kept:,.0f}",
        "MB, process": " → ".join(f"{value:.0f}" for value in process if value is not None),
    }


def figures(out: Path, name: str, group: Group) -> Iterator[Figure]:
    """Error over time and memory over time of the first seed of each entry, other bases of W⊥ left out."""
    entries = [entry for entry in group.entries if entry.basis == StreamConfig.basis]
    first = [(entry, rows[0]) for entry in entries if (rows := reported(out, group, entry))]
    for what, label, scale in (("error", "error", "log"), ("process_mb", "memory of the process, MB", "linear")):
        curves = []
        for entry, record in first:
            points = {point["step"]: point[what] for point in record["curve"] if point[what] is not None}
            curves.append(Curve(named(entry), STYLES.get(entry.rule, entry.rule), list(points), list(points.values())))
        words = (slugify(f"streams {name} {what}"), f"{TITLES[name]}: {label}", "step", label)
        if curves:
            yield Figure(*words, curves, y_scale=scale)
