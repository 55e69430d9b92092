"""What a step of a method costs, for the page of each method, from the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradguess_lab.methods import method_label
from gradguess_lab.tables.table import Cell, Table, number, text

Record = Mapping[str, Any]
WIDTHS = ((64, 512, 1024), (64, 512, 4096))  # that are shown, of the record on a CPU and of the one on a GPU
PEAK = 512  # the width at which memory is shown
PAGES = {  # the rows of each table, by the name of its mark
    "cost-weight": ("weight",),
    "cost-activation": ("activation",),
    "cost-wt": ("wt",),
    "cost-wperp": ("wperp", "wperp-subspace", "wperp-svd"),
    "cost-ns": ("wperp-ns", "wperp-subspace", "wperp-svd"),
    "cost-feedback": (
        "feedback-direct",
        "feedback-chained",
        "feedback-corrected",
        "feedback-direct-rare",
        "feedback-chained-rare",
    ),
}


def cost_tables(cpu: Record, cuda: Record, memory: Record, steps: Record) -> list[Table]:
    """Every table of `PAGES`, and those of students and of checkpoints."""
    made = [_times(slug, methods, cpu, cuda) for slug, methods in PAGES.items()]
    return [*made, _students(steps), _checkpoints(memory)]


def place_of(record: Record) -> str:
    """The device of a benchmark, in short."""
    return str(record["environment"]["device"]).removeprefix("NVIDIA ").replace("cpu", "CPU")


def method_cell(method: str, row: Record | None) -> Cell:
    """The method; with what was timed, where that was one step on a part of the batch."""
    if row is None or not row["scaled_from"]:
        return text(method_label(method))
    parts = row["batch"] // row["scaled_from"]
    return Cell(method_label(method), method_label(method), note=f"one step on {row['scaled_from']} samples × {parts}")


def _times(slug: str, methods: Sequence[str], cpu: Record, cuda: Record) -> Table:
    places = [(record, width) for record, widths in zip((cpu, cuda), WIDTHS, strict=True) for width in widths]
    heads = (f"{place_of(record)}, {width}" for record, width in places)
    rows = []
    for method in ("backprop", *methods):
        mine = [_row(record, width, method) for record, width in places]
        ratios = (ratio_cell(None if row is None else row["ratio"]) for row in mine)
        peak = _row(cpu, PEAK, method)
        whole = peak is not None and not peak["scaled_from"]  # else it is that of a part of the batch
        megabytes = number(peak["peak_mb"] if peak and whole else None, ".0f")
        rows.append((method_cell(method, mine[0]), *ratios, megabytes))
    return Table(slug, "What a step costs", ("", *heads, f"MB, {place_of(cpu)}, {PEAK}"), tuple(rows), "")


def _row(record: Record, width: int, method: str) -> Record | None:
    return next((row for row in record["rows"] if (row["width"], row["method"]) == (width, method)), None)


def ratio_cell(ratio: float | None) -> Cell:
    return number(ratio, ".3g") if ratio is None or ratio < 1000 else Cell(f"{ratio:,.0f}", ratio)


def _students(record: Record) -> Table:
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


def _checkpoints(record: Record) -> Table:
    """Memory without the gradients of the parameters, and time over backpropagation's, at the largest depth."""
    depth = max(row["depth"] for row in record["rows"])
    rows = {row["method"]: row for row in record["rows"] if row["depth"] == depth}
    shown = tuple(
        (
            text(method_label(name)),
            number(row["peak_mb"] - row["gradients_mb"], ".0f"),
            ratio_cell(row["step_ms"] / rows["backprop"]["step_ms"]),
        )
        for name, row in rows.items()
        if name in ("backprop", "checkpoint-all", "checkpoint-sqrt", "replay")
    )
    return Table("cost-checkpoints", "What a step costs", ("", f"MB, {depth} layers", "Step"), shown, "")
