"""Benchmarks as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradguess_lab.methods import VARIANTS, method_label, style_name
from gradguess_lab.tables.compiled import compiled_table, starts_table
from gradguess_lab.tables.table import Cell, Curve, Figure, Table, constant, number, text

_RARE = "Rare tangents: on a quarter of the batch at every fourth step. "
_SETTING = ("Width", "Depth", "Batch", "k", "Dtype", "Device")
Record = Mapping[str, Any]


def bench_tables(records: Sequence[Record]) -> list[Table]:
    """For each benchmark the measurements, and how they grow where that was fitted; what is in claims alone is not."""
    kinds = {
        "time": _time_table,
        "memory": _memory_table,
        "tasks": _task_table,
        "compiled": lambda record: compiled_table(record, _device(record), _place(record)),
        "starts": lambda record: starts_table(record, _device(record), _place(record)),
    }
    shown = [record for record in records if record["kind"] in kinds]
    made = [make(record) for record in shown for make in (kinds[record["kind"]], _growth_table)]
    return [table for table in made if table.rows or not table.slug.startswith("bench-growth")]


def _device(record: Record) -> str:
    return str(record["rows"][0]["device"]).partition(":")[0] if record["rows"] else "none"


def _suffix(record: Record) -> str:
    return f"{record['kind']}-{_device(record)}"


def _place(record: Record) -> str:
    where = record["environment"]
    return (
        f"{where['device']}, {where['threads']} threads, PyTorch {where['torch']}, "
        f"load {where['load_before']:.1f} before and {where['load_after']:.1f} after."
    )


def _settings(row: Record) -> tuple[Cell, ...]:
    return tuple(
        number(row[name.lower()], "d") if isinstance(row[name.lower()], int) else text(row[name.lower()])
        for name in _SETTING
    )


def _time_table(record: Record) -> Table:
    columns = ("Method", *_SETTING, "Ratio", "Quiet ratio", "Step, ms", "Refresh, ms", "Memory, MB", "Note")
    rows = tuple(
        (
            text(method_label(row["method"])),
            *_settings(row),
            number(row["ratio"], ".2f" if row["ratio"] < 100 else ".0f"),
            number(row["quiet_ratio"], ".2f" if row["quiet_ratio"] < 100 else ".0f"),
            number(row["step_ms"], ".2f"),
            number(row["refresh_ms"], ".2f"),
            number(row["peak_mb"], ".1f"),
            text(f"scaled from {row['scaled_from']} samples" if row["scaled_from"] else ""),
        )
        for row in record["rows"]
    )
    caption = (
        "Ratio: time of a training step over that of backpropagation, median of paired rounds of four steps; refreshes "
        "are timed apart and spread over the steps between them. Quiet ratio: the same from the fastest decile of "
        "rounds. Memory: peak above weights and optimiser, of a process of its own. " + _RARE + _place(record)
    )
    hidden = constant(columns, rows, (*_SETTING, "Note"))
    return Table(f"bench-{_suffix(record)}", f"Time per step, {_device(record)}", columns, rows, caption, hidden=hidden)


def _task_table(record: Record) -> Table:
    columns = ("Task", "Method", "Device", "Ratio", "Quiet ratio", "Step, ms", "Refresh, ms")
    rows = tuple(
        (
            text(row["task"]),
            text(method_label(row["method"])),
            text(row["device"]),
            number(row["ratio"], ".2f"),
            number(row["quiet_ratio"], ".2f"),
            number(row["step_ms"], ".1f"),
            number(row["refresh_ms"], ".1f"),
        )
        for row in record["rows"]
    )
    caption = (
        "Ratio: time of a training step over that of a plain loop with backpropagation, median of paired rounds of "
        "four steps, refreshes included. Quiet ratio: the same from the fastest decile of rounds. "
        + _RARE
        + _place(record)
    )
    hidden = constant(columns, rows, ("Device",))
    return Table(f"bench-{_suffix(record)}", "Real networks", columns, rows, caption, hidden=hidden)


def _memory_table(record: Record) -> Table:
    columns = ("Method", *_SETTING, "Memory, MB", "of it gradients", "Step, ms", "Time ratio")
    base = {row["depth"]: row["step_ms"] for row in record["rows"] if row["method"] == "backprop"}
    rows = tuple(
        (
            text(method_label(row["method"])),
            *_settings(row),
            number(row["peak_mb"], ".1f"),
            number(row["gradients_mb"], ".1f"),
            number(row["step_ms"], ".1f"),
            number(row["step_ms"] / base[row["depth"]], ".2f") if row["depth"] in base else text(""),
        )
        for row in record["rows"]
    )
    caption = (
        "Peak above weights and optimiser, each in a process of its own; the gradients of the parameters are part of "
        "it for every method. Time ratio: to backpropagation at the same depth. " + _place(record)
    )
    hidden = constant(columns, rows, _SETTING)
    return Table(f"bench-{_suffix(record)}", "Memory and time over the depth", columns, rows, caption, hidden=hidden)


def _growth_table(record: Record) -> Table:
    memory = record["kind"] == "memory"
    value = "mb_per_layer" if memory else "exponent"
    columns = ("Method", "Axis", "MB per layer" if memory else "Exponent", "Points")
    rows = tuple(
        (
            text(method_label(fit["method"])),
            text(fit["axis"]),
            number(fit[value], ".3f" if memory else ".2f"),
            number(fit["points"], "d"),
        )
        for fit in record["growth"]
    )
    caption = (
        "Slope of memory over depth, without the parameters' gradients."
        if memory
        else "a in time ~ axis^a, least squares over the quiet times."
    )
    return Table(f"bench-growth-{_suffix(record)}", "Growth", columns, rows, caption)


def bench_figures(records: Sequence[Record]) -> list[Figure]:
    """Time over the width, or memory and time over the depth; none from a single point."""
    made: list[Figure | None] = []
    for record in records:
        if record["kind"] == "time":
            made.append(_figure(record, "width", "ratio", "Time of a step over backpropagation's", log_y=True))
        if record["kind"] == "memory":
            made.append(_figure(record, "depth", "peak_mb", "Peak memory, MB", log_y=False))
            made.append(_figure(record, "depth", "step_ms", "Step, ms", log_y=True))
    return [figure for figure in made if figure is not None]


def _figure(record: Record, axis: str, value: str, title: str, log_y: bool) -> Figure | None:
    rows = record["rows"]
    others = [name.lower() for name in _SETTING if name.lower() != axis]
    alike = [row for row in rows if all(row[name] == rows[0][name] for name in others)]
    ticks = sorted({row[axis] for row in alike})
    if len(ticks) < 2:
        return None
    methods = list(dict.fromkeys(row["method"] for row in alike))
    return Figure(
        f"bench-{_suffix(record)}-{value.replace('_', '-')}",
        title,
        axis.capitalize(),
        title,
        tuple(_curve(method, alike, axis, value) for method in methods),
        x_ticks=tuple(ticks),
        log_x=True,
        log_y=log_y,
        legend_columns=1,
    )


def _curve(method: str, rows: Sequence[Record], axis: str, value: str) -> Curve:
    points = sorted((row[axis], row[value]) for row in rows if row["method"] == method)
    x, y = zip(*points, strict=True)
    dashed = method in VARIANTS and VARIANTS[method].dashed
    return Curve(method_label(method), x, y, style_name(method), dashed=dashed, markers=True)
