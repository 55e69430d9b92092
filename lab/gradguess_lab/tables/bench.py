"""Benchmarks as tables and figures: what a step costs in time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradguess_lab.methods import VARIANTS, method_label, style_name
from gradguess_lab.tables.figure import Curve, Figure
from gradguess_lab.tables.table import Cell, Table, cell, matrix
from gradguess_lab.tables.verdicts import DIFFERS, HOLDS

Record = Mapping[str, Any]
SETTING = ("Width", "Depth", "Batch", "k", "Dtype", "Device")
MODES = {
    "eager": "eager",
    "captured": "captured",
    "compiled": "compiled",
    "compiled-captured": "compiled and captured",
}
_PAIRED = "median of paired rounds of four steps. Quiet ratio: from the fastest decile of rounds. "
_RARE = "Rare tangents: on a quarter of the batch at every fourth step. "


@dataclass(frozen=True)
class Kind:
    """How a kind of benchmark is shown: its title, the key of a row for each column, and the caption."""

    title: str
    columns: Mapping[str, str]
    caption: str


_TASK = {"Task": "task", "Method": "method"}
_CASE = {"Method": "method", **{name: name.lower() for name in SETTING}}
_RATIOS = {"Ratio": "ratio", "Quiet ratio": "quiet_ratio", "Step, ms": "step_ms", "Refresh, ms": "refresh_ms"}
_STARTS = {"First start, s": "first_s", "Second start, s": "second_s"}
KINDS = {
    "time": Kind(
        "Time per step",
        {**_CASE, **_RATIOS, "Memory, MB": "peak_mb", "Scaled from": "scaled_from"},
        f"Ratio: time of a training step over that of backpropagation, {_PAIRED}Refreshes are timed apart and spread "
        f"over the steps between them. Memory: peak above weights and optimiser, of a process of its own. {_RARE}"
        "Scaled from: the samples that were timed together.",
    ),
    "memory": Kind(
        "Memory and time over the depth",
        {**_CASE, "Memory, MB": "peak_mb", "of it gradients": "gradients_mb", "Step, ms": "step_ms"},
        "Peak above weights and optimiser, each in a process of its own; the gradients of the parameters are part of "
        "it for every method. Time ratio: to backpropagation at the same depth.",
    ),
    "tasks": Kind(
        "Real networks",
        {**_TASK, "Device": "device", **_RATIOS},
        f"Ratio: time of a training step over that of a plain loop with backpropagation, {_PAIRED}{_RARE}",
    ),
    "compiled": Kind(
        "Compiled steps",
        {**_TASK, "Mode": "mode", "Step, ms": "step_ms", "Refresh, ms": "refresh_ms", "Memory, MB": "peak_mb",
         "First steps, s": "start_s"},
        "÷: the time of a step over that of backpropagation in this mode, in the same run; refreshes and lessons are "
        "counted as often as they come. Memory: peak above weights and optimiser. First steps: until every kind of "
        "step is compiled and captured, while other tasks were compiled as well; a captured loop takes over what its "
        "uncaptured twin compiled.",
    ),
    "starts": Kind(
        "Start of a compiled run",
        {**_TASK, "Device": "device", **_STARTS},
        "Seconds until every kind of step is compiled: in a process with an empty cache, and in a second process that "
        "finds what the first one compiled.",
    ),
}  # fmt: skip


def bench_tables(records: Sequence[Record]) -> list[Table]:
    """For each benchmark the measurements, and how they grow where that was fitted."""
    tables = []
    for record in records:
        if record["kind"] in KINDS and record["rows"]:
            kind, device, where = KINDS[record["kind"]], _device(record), record["environment"]
            place = (
                f" {where['device']}, {where['threads']} threads, PyTorch {where['torch']}, load "
                f"{where['load_before']:.1f} before and {where['load_after']:.1f} after."
            )
            slug, same = f"{record['kind']}-{device}", (*SETTING, "Scaled from", "Note")
            rows = [_row(row, kind, record) for row in record["rows"]]
            tables.append(Table(f"bench-{slug}", f"{kind.title}, {device}", rows, kind.caption + place, same))
            tables.append(Table(f"bench-growth-{slug}", f"Growth: {kind.title.lower()}", _growth(record), _GROWTH))
    return [table for table in tables if table.rows]


def _row(row: Record, kind: Kind, record: Record) -> dict[str, Any]:
    shown = {name: row.get(key) for name, key in kind.columns.items()} | {"Method": method_label(row["method"])}
    if record["kind"] == "memory":
        base = {one["depth"]: one["step_ms"] for one in record["rows"] if one["method"] == "backprop"}
        shown["Time ratio"] = row["step_ms"] / base[row["depth"]] if row["depth"] in base else None
    if record["kind"] == "compiled":
        ratios = {f"÷ {MODES[mode]}": cell(row["ratios"][mode], ".2f") for mode in _modes(record)}
        shown |= {"Mode": MODES[row["mode"]], **ratios, "Note": " ".join(row["notes"])}
    return shown


_GROWTH = "Exponent: a in time ~ axis^a, least squares over the quiet times. MB per layer: without the gradients."


def _growth(record: Record) -> list[dict[str, Any]]:
    keys = {"mb_per_layer": ("MB per layer", ".3f"), "exponent": ("Exponent", ".2f")}
    return [
        {"Method": method_label(fit["method"]), "Axis": fit["axis"]}
        | {title: cell(fit[key], form) for key, (title, form) in keys.items() if key in fit}
        | {"Points": fit["points"]}
        for fit in record["growth"]
    ]


def _device(record: Record) -> str:
    return str(record["rows"][0]["device"]).partition(":")[0]


def bench_figures(records: Sequence[Record]) -> list[Figure]:
    """Time over the width, or memory and time over the depth; none from a single point."""
    shown = {
        "time": [("width", "ratio", "Time of a step over backpropagation's", "log")],
        "memory": [("depth", "peak_mb", "Peak memory, MB", "linear"), ("depth", "step_ms", "Step, ms", "log")],
    }
    figures = []
    for record in records:
        for axis, value, title, scale in shown.get(record["kind"], ()):
            others = [name.lower() for name in SETTING if name.lower() != axis]
            alike = [row for row in record["rows"] if all(row[name] == record["rows"][0][name] for name in others)]
            ticks, curves = sorted({row[axis] for row in alike}), []
            for method in dict.fromkeys(row["method"] for row in alike):
                x, y = zip(*sorted((row[axis], row[value]) for row in alike if row["method"] == method), strict=True)
                hollow = method in VARIANTS and VARIANTS[method].dashed
                curves.append(Curve(method_label(method), style_name(method), x, y, kind="bars", hollow=hollow))
            if len(ticks) > 1:
                slug = f"bench-{record['kind']}-{_device(record)}-{value.replace('_', '-')}"
                words = (slug, title, axis.capitalize(), title)
                figures.append(Figure(*words, curves, x_ticks=ticks, x_scale="log", y_scale=scale))
    return figures


# --- the paper's claims about cost ---


def speed_claims_table(records: Sequence[Record]) -> Table:
    """W⊥-NS against the SVD: each pair of rows that differ in the method alone, on one device, in equal batches."""

    def together(row: Record) -> int:
        return int(row["scaled_from"] or row["batch"])  # samples that are computed at a time

    equal = ("width", "depth", "batch", "k", "dtype", "device")
    measured = [row for record in records if record["kind"] in ("time", "batching") for row in record["rows"]]
    found = {(row["method"], *(row.get(name) for name in equal), together(row)): row for row in measured}
    rows = []
    for (method, *where), ns in found.items():
        svd = found.get(("wperp-svd", *where))
        if method != "wperp-ns" or svd is None:
            continue
        place = f"width {ns['width']}, {together(ns)} samples at a time, {str(ns['device']).partition(':')[0]}"
        claims = [(f"A step of W⊥-NS is faster than one of W⊥ by SVD ({place}).", "step_ms", "ms", (0.0, 1.0))]
        if ns["width"] == 512 and ns.get("peak_mb") and svd.get("peak_mb"):
            says = f"W⊥-NS needs about a tenth of the memory, between 0.05 and 0.2 ({place})."
            claims.append((says, "peak_mb", "MB", (0.05, 0.2)))
        for says, quantity, unit, (low, high) in claims:
            ratio = ns[quantity] / svd[quantity]
            sides = {
                name: Cell(f"{row[quantity]:,.{1 if row[quantity] < 100 else 0}f} {unit}", row[quantity])
                for name, row in (("W⊥-NS", ns), ("W⊥ by SVD", svd))
            }
            verdict = HOLDS if low < ratio < high else DIFFERS
            rows.append({"The paper says": says, **sides, "Ratio": ratio, "Verdict": verdict})
    caption = "From one benchmark on one device, with as many samples at a time in both: medians, without a test."
    return Table("claims-cost", "Claims about cost", rows, caption)


# --- tables of the docs ---


def ratio_cell(ratio: float) -> Cell:
    return cell(ratio, ".3g" if ratio < 1000 else ",.0f")


def times_table(record: Record) -> Table:
    """Ratio of a step to backpropagation's, by method and width; of backpropagation the time."""
    rows = record["rows"]
    first: dict[str, Record] = {}
    for row in sorted(rows, key=lambda row: row["width"]):
        first.setdefault(row["method"], row)

    def name(row: Record) -> str:
        part = first[row["method"]]["scaled_from"]
        scaled = f" (one step on {part} samples × {row['batch'] // part})" if part else ""
        return method_label(row["method"]) + scaled

    widths = [f"width {width}" for width in sorted({row["width"] for row in rows})]
    cells = [
        (name(row), f"width {row['width']}",
         f"{row['step_ms']:.3g} ms" if row["method"] == "backprop" else ratio_cell(row["ratio"]))
        for row in sorted(rows, key=lambda row: row["method"] != "backprop")
    ]  # fmt: skip
    return Table("times", "", matrix("", cells, widths))


def memory_table(record: Record) -> Table:
    """Peak memory without the parameters' gradients, and time over backpropagation's, by method and depth."""
    rows = record["rows"]
    base = {row["depth"]: row["step_ms"] for row in rows if row["method"] == "backprop"}
    depths = sorted(base)
    columns = [*(f"depth {depth}" for depth in depths), *(f"time, {depth}" for depth in depths)]
    cells = []
    for row in rows:
        method, depth = method_label(row["method"]), row["depth"]
        cells.append((method, f"depth {depth}", f"{row['peak_mb'] - row['gradients_mb']:.0f} MB"))
        cells.append((method, f"time, {depth}", f"{row['step_ms'] / base[depth]:.2f}"))
    return Table("memory", "", matrix("", cells, columns))


def compiled_matrix(record: Record) -> Table:
    """By task and method, in the last mode that each has: time over backpropagation's in its last mode, peak memory."""
    modes, rows = _modes(record), record["rows"]
    last = {(row["task"], row["method"]): row for mode in modes for row in rows if row["mode"] == mode}
    cells = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for method in dict.fromkeys(row["method"] for row in rows):
            row, base = last[task, method], method == "backprop"
            time = f"{row['step_ms']:.3g} ms" if base else f"{row['ratios'][modes[-1]]:.2f}"
            title = method_label(method) + (f", {MODES[modes[-1]]}" if base else "")
            cells.append((task, title, f"{time}, {row['peak_mb']:.0f} MB"))
    return Table("compiled", "", matrix("", cells))


def students_table(record: Record) -> Table:
    """A step of each way to train a deep network, and over backpropagation's with the same network, uncompiled."""
    rows = record["rows"]
    base = {row["task"]: row["step_ms"] for row in rows if row["method"] == "backprop" and not row["compiled"]}
    shown = [
        {
            "": method_label(row["method"]),
            "Network": row["task"],
            "Pieces": row["sites"] if row["sites"].isdecimal() else "–",
            "Compiled": row["compiled"],
            "ms": row["step_ms"],
            "Over backpropagation, uncompiled": ratio_cell(row["step_ms"] / base[row["task"]]),
            "Peak, MB": row.get("peak_mb"),
        }
        for row in rows
    ]
    return Table("cost-students", "What a step costs", shown, forms={"ms": ".1f", "Peak, MB": ".0f"})


def _modes(record: Record) -> list[str]:
    """Those in which backpropagation was timed."""
    found = {row["mode"] for row in record["rows"] if row["method"] == "backprop"}
    return [mode for mode in MODES if mode in found]
