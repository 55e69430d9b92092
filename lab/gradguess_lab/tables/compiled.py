"""Compiled steps on real networks, as tables: against backpropagation that is eager, captured and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradguess_lab.methods import method_label
from gradguess_lab.tables.table import Cell, Table, constant, number, text

Record = Mapping[str, Any]
MODES = {
    "eager": "eager",
    "captured": "captured",
    "compiled": "compiled",
    "compiled-captured": "compiled and captured",
}


def compiled_table(record: Record, device: str, place: str) -> Table:
    """Every loop that was measured."""
    modes = _modes(record)
    columns = ("Task", "Method", "Mode", "Step, ms", *(f"÷ {MODES[mode]}" for mode in modes))
    columns += ("Refresh, ms", "Memory, MB", "First steps, s", "Note")
    rows = tuple(
        (
            text(row["task"]),
            text(method_label(row["method"])),
            text(MODES[row["mode"]]),
            number(row["step_ms"], ".3g"),
            *(number(row["ratios"][mode], ".2f") for mode in modes),
            number(row["refresh_ms"], ".3g"),
            number(row["peak_mb"], ".1f"),
            number(row["start_s"], ".1f"),
            text(" ".join(row["notes"])),
        )
        for row in record["rows"]
    )
    caption = (
        "÷: the time of a step over that of backpropagation in this mode, in the same run; refreshes and lessons are "
        "counted as often as they come. Memory: peak above weights and optimiser. First steps: until every kind of "
        "step is compiled and captured, while other tasks were compiled as well; a captured loop takes over what its "
        f"uncaptured twin compiled. {place}"
    )
    hidden = constant(columns, rows, ("Note",))
    return Table(f"bench-compiled-{device}", f"Compiled steps, {device}", columns, rows, caption, hidden=hidden)


def starts_table(record: Record, device: str, place: str) -> Table:
    """How long a compiled run takes to start, without and with PyTorch's cache."""
    columns = ("Task", "Method", "Device", "First start, s", "Second start, s")
    rows = tuple(
        (
            text(row["task"]),
            text(method_label(row["method"])),
            text(row["device"]),
            number(row["first_s"], ".1f"),
            number(row["second_s"], ".1f"),
        )
        for row in record["rows"]
    )
    caption = (
        "Seconds until every kind of step is compiled: in a process with an empty cache, and in a second process "
        f"that finds what the first one compiled. {place}"
    )
    hidden = constant(columns, rows, ("Device",))
    return Table(f"bench-starts-{device}", f"Start of a compiled run, {device}", columns, rows, caption, hidden=hidden)


def compiled_matrix(record: Record) -> Table:
    """By task and method, in the last mode that each has: time over backpropagation's in its last mode, peak memory."""
    modes, rows = _modes(record), record["rows"]
    last = {(row["task"], row["method"]): row for mode in modes for row in rows if row["mode"] == mode}
    tasks = dict.fromkeys(row["task"] for row in rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    columns = ("", *(_title(method, modes) for method in methods))

    def cell(row: Record) -> Cell:
        time = f"{row['step_ms']:.3g} ms" if row["method"] == "backprop" else f"{row['ratios'][modes[-1]]:.2f}"
        return text(f"{time}, {row['peak_mb']:.0f} MB")

    body = tuple((text(task), *(cell(last[task, method]) for method in methods)) for task in tasks)
    return Table("compiled", "", columns, body)


def _title(method: str, modes: Sequence[str]) -> str:
    return f"{method_label(method)}, {MODES[modes[-1]]}" if method == "backprop" else method_label(method)


def _modes(record: Record) -> list[str]:
    """Those in which backpropagation was timed."""
    found = {row["mode"] for row in record["rows"] if row["method"] == "backprop"}
    return [mode for mode in MODES if mode in found]
