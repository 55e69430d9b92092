"""Benchmarks as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradguess.experiments.tables import Cell, Curve, Figure, Table, constant, method_label, number, text

__all__ = ["figures", "label", "tables"]

_LABELS = {
    "backprop-wrapped": "Backpropagation, wrapped",
    "wperp-subspace": "W⊥, subspace solver",
    "wperp-svd": "W⊥, dense SVD",
    "feedback-direct-rare": "Feedback, direct, every 4th step, ¼ batch",
    "feedback-chained-rare": "Feedback, chained, every 4th step, ¼ batch",
    "feedback-chained-pieces": "Feedback, chained, 3 pieces, every 4th step, ¼ batch",
    "feedback-chained-bootstrap": "Feedback, chained, bootstrap alone",
    "feedback-chained-pieces-bootstrap": "Feedback, chained, 3 pieces, bootstrap alone",
    "checkpoint-all": "Backpropagation, every layer recomputed",
    "checkpoint-sqrt": "Backpropagation, √depth checkpoints",
    "store": "W⊥, store",
    "replay": "W⊥, replay",
    "feedback-replay": "Feedback, direct, replay",
    "pieces-replay": "Feedback, chained, √depth pieces, replay",
}
_STYLES = {
    "backprop-wrapped": "wp",
    "wperp-subspace": "wperp-ns",
    "wperp-svd": "wperp-bottom",
    "feedback-direct-rare": "feedback-direct",
    "feedback-chained-rare": "feedback-chained",
    "checkpoint-all": "layer-1",
    "checkpoint-sqrt": "layer-3",
    "store": "wperp",
    "replay": "feedback-direct",
    "feedback-replay": "feedback-chained",
    "pieces-replay": "layer-2",
}
_SETTING = ("Width", "Depth", "Batch", "k", "Dtype", "Device")
Record = Mapping[str, Any]


def label(method: str) -> str:
    return _LABELS.get(method) or method_label(method)


def tables(record: Record) -> tuple[Table, ...]:
    """The measurements, and how they grow."""
    main = {"time": _time_table, "memory": _memory_table, "tasks": _task_table}[record["kind"]](record)
    grown = _growth_table(record)
    return (main, grown) if grown.rows else (main,)


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
            text(label(row["method"])),
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
        "rounds. Memory: peak above weights and optimiser, of a process of its own. " + _place(record)
    )
    hidden = constant(columns, rows, (*_SETTING, "Note"))
    return Table(f"bench-{_suffix(record)}", f"Time per step, {_device(record)}", columns, rows, caption, hidden=hidden)


def _task_table(record: Record) -> Table:
    columns = ("Task", "Method", "Device", "Ratio", "Quiet ratio", "Step, ms", "Refresh, ms")
    rows = tuple(
        (
            text(row["task"]),
            text(label(row["method"])),
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
        "four steps, refreshes included. Quiet ratio: the same from the fastest decile of rounds. " + _place(record)
    )
    hidden = constant(columns, rows, ("Device",))
    return Table(f"bench-{_suffix(record)}", "Real networks", columns, rows, caption, hidden=hidden)


def _memory_table(record: Record) -> Table:
    columns = ("Method", *_SETTING, "Memory, MB", "of it gradients", "Step, ms", "Time ratio")
    base = {row["depth"]: row["step_ms"] for row in record["rows"] if row["method"] == "backprop"}
    rows = tuple(
        (
            text(label(row["method"])),
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
            text(label(fit["method"])),
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


def figures(record: Record) -> tuple[Figure, ...]:
    """Ratio over width, or memory and time over depth; none from a single point."""
    if record["kind"] == "tasks":
        return ()
    made: list[Figure | None]
    if record["kind"] == "time":
        made = [_figure(record, "width", "ratio", "Time of a step over backpropagation's", log_y=True)]
    else:
        made = [
            _figure(record, "depth", "peak_mb", "Peak memory, MB", log_y=False),
            _figure(record, "depth", "step_ms", "Step, ms", log_y=True),
        ]
    return tuple(figure for figure in made if figure is not None)


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
    return Curve(label(method), x, y, _STYLES.get(method, method), dashed=method.endswith("rare"), markers=True)
