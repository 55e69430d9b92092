"""What a step costs: cells that several tables share, and students on deep networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradguess_lab.methods import method_label
from gradguess_lab.tables.table import Cell, Table, number, text

Record = Mapping[str, Any]


def place_of(record: Record) -> str:
    """The device of a benchmark, in short."""
    return str(record["environment"]["device"]).removeprefix("NVIDIA ").replace("cpu", "CPU")


def method_cell(method: str, row: Record | None) -> Cell:
    """The method; with what was timed, where that was one step on a part of the batch."""
    if row is None or not row["scaled_from"]:
        return text(method_label(method))
    parts = row["batch"] // row["scaled_from"]
    return Cell(method_label(method), method_label(method), note=f"one step on {row['scaled_from']} samples × {parts}")


def ratio_cell(ratio: float | None) -> Cell:
    return number(ratio, ".3g") if ratio is None or ratio < 1000 else Cell(f"{ratio:,.0f}", ratio)


def students_table(record: Record) -> Table:
    """A step of each way to train a deep network, and over backpropagation's with the same network, uncompiled."""
    rows = record["rows"]
    base = {row["task"]: row["step_ms"] for row in rows if row["method"] == "backprop" and not row["compiled"]}
    shown = tuple(
        (
            text(method_label(row["method"])),
            text(row["task"]),
            text(row["sites"] if row["sites"].isdecimal() else "–"),
            text("yes" if row["compiled"] else "no"),
            number(row["step_ms"], ".1f"),
            ratio_cell(row["step_ms"] / base[row["task"]]),
            number(row.get("peak_mb"), ".0f"),
        )
        for row in rows
    )
    columns = ("", "Network", "Pieces", "Compiled", "ms", "Over backpropagation, uncompiled", "Peak, MB")
    return Table("cost-students", "What a step costs", columns, shown, "")
