"""Benchmarks as tables and figures: what a step costs in time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradguess_lab.methods import VARIANTS, method_label, style_name
from gradguess_lab.tables.figure import Curve, Figure
from gradguess_lab.tables.table import Cell, Row, Table, cell, matrix, table
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


_TASK = {"Task": "task", "Method": "method"}
_CASE = {"Method": "method", **{name: name.lower() for name in SETTING}}
_RATIOS = {"Ratio": "ratio", "Quiet ratio": "quiet_ratio", "Step, ms": "step_ms", "Refresh, ms": "refresh_ms"}
_MEMORY = {"Memory, MB": "peak_mb"}
_COMPILED = {"Mode": "mode", "Step, ms": "step_ms", "Refresh, ms": "refresh_ms", **_MEMORY, "First steps, s": "start_s"}
# Of each kind of benchmark: its title, the key of a row for each column, and the caption.
KINDS: dict[str, tuple[str, dict[str, str], str]] = {
    "time": (
        "Time per step",
        {**_CASE, **_RATIOS, **_MEMORY, "Scaled from": "scaled_from"},
        f"Ratio: time of a training step over that of backpropagation, {_PAIRED}Refreshes are timed apart and spread "
        f"over the steps between them. Memory: peak above weights and optimiser, of a process of its own. {_RARE}"
        "Scaled from: the samples that were timed together.",
    ),
    "memory": (
        "Memory and time over the depth",
        {**_CASE, **_MEMORY, "of it gradients": "gradients_mb", "Step, ms": "step_ms"},
        "Peak above weights and optimiser, each in a process of its own; the gradients of the parameters are part of "
        "it for every method. Time ratio: to backpropagation at the same depth.",
    ),
    "tasks": (
        "Real networks",
        {**_TASK, "Device": "device", **_RATIOS},
        f"Ratio: time of a training step over that of a plain loop with backpropagation, {_PAIRED}{_RARE}",
    ),
    "compiled": (
        "Compiled steps",
        {**_TASK, **_COMPILED},
        "÷: the time of a step over that of backpropagation in this mode, in the same run; refreshes and lessons are "
        "counted as often as they come. Memory: peak above weights and optimiser. First steps: until every kind of "
        "step is compiled and captured; a captured loop takes over what its uncaptured twin compiled.",
    ),
    "starts": (
        "Start of a compiled run",
        {**_TASK, "Device": "device", "First start, s": "first_s", "Second start, s": "second_s"},
        "Seconds until every kind of step is compiled: with an empty cache, and in a second process that finds what "
        "the first one compiled.",
    ),
}
_GROWTH = "Exponent: a in time ~ axis^a, least squares over the quiet times. MB per layer: without the gradients."


def bench_tables(records: Sequence[Record]) -> Iterator[Table]:
    """For each benchmark the measurements, and how they grow where that was fitted."""
    for record in records:
        if record["kind"] in KINDS and record["rows"]:
            (title, columns, caption), device = KINDS[record["kind"]], _device(record)
            where, slug, same = record["environment"], f"{record['kind']}-{device}", (*SETTING, "Scaled from", "Note")
            place = (
                f" {where['device']}, {where['threads']} threads, PyTorch {where['torch']}, load "
                f"{where['load_before']:.1f} before and {where['load_after']:.1f} after."
            )
            rows = [_row(row, columns, record) for row in record["rows"]]
            yield Table(f"bench-{slug}", f"{title}, {device}", rows, caption + place, same)
            if record["growth"]:
                yield Table(f"bench-growth-{slug}", f"Growth: {title.lower()}", _growth(record), _GROWTH)


def _row(row: Record, columns: Mapping[str, str], record: Record) -> Row:
    shown = {name: row.get(key) for name, key in columns.items()} | {"Method": method_label(row["method"])}
    if record["kind"] == "memory":
        base = _base(record, "depth").get(row["depth"])
        shown["Time ratio"] = row["step_ms"] / base if base else None
    if record["kind"] == "compiled":
        ratios = {f"÷ {MODES[mode]}": cell(row["ratios"][mode], ".2f") for mode in _modes(record)}
        shown |= {"Mode": MODES[row["mode"]], **ratios, "Note": " ".join(row["notes"])}
    return shown


def _growth(record: Record) -> list[Row]:
    keys = {"mb_per_layer": ("MB per layer", ".3f"), "exponent": ("Exponent", ".2f")}
    return [
        {"Method": method_label(fit["method"]), "Axis": fit["axis"]}
        | {title: cell(fit[key], form) for key, (title, form) in keys.items() if key in fit}
        | {"Points": fit["points"]}
        for fit in record["growth"]
    ]


def _device(record: Record) -> str:
    return str(record["rows"][0]["device"]).partition(":")[0]


def _base(record: Record, along: str) -> dict[Any, float]:
    """The milliseconds of a step of backpropagation, not compiled, by what changes along a benchmark."""
    rows = [row for row in record["rows"] if row["method"] == "backprop" and not row.get("compiled")]
    return {row[along]: row["step_ms"] for row in rows}


def _modes(record: Record) -> list[str]:
    """Those in which backpropagation was timed."""
    found = {row["mode"] for row in record["rows"] if row["method"] == "backprop"}
    return [mode for mode in MODES if mode in found]


def bench_figures(records: Sequence[Record]) -> Iterator[Figure]:
    """Time over the width, or memory and time over the depth; none from a single point."""
    shown = {
        "time": [("width", "ratio", "Time of a step over backpropagation's", "log")],
        "memory": [("depth", "peak_mb", "Peak memory, MB", "linear"), ("depth", "step_ms", "Step, ms", "log")],
    }
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
                yield Figure(*words, curves, x_ticks=ticks, x_scale="log", y_scale=scale)


# --- the paper's claims about cost ---


@table(
    "claims-cost",
    "Claims about cost",
    "From one benchmark on one device, with as many samples at a time in both: medians, without a test.",
)
def speed_claims_table(records: Sequence[Record]) -> Iterator[Row]:
    """W⊥-NS against the SVD: each pair of rows that differ in the method alone, on one device, in equal batches."""
    equal = ("width", "depth", "batch", "k", "dtype", "device")
    measured = [row for record in records if record["kind"] in ("time", "batching") for row in record["rows"]]
    found = {(row["method"], *(row.get(name) for name in equal), row["scaled_from"] or row["batch"]): row
             for row in measured}  # fmt: skip
    for (method, *where, together), ns in found.items():
        svd = found.get(("wperp-svd", *where, together))
        if method != "wperp-ns" or svd is None:
            continue
        place = f"width {ns['width']}, {together} samples at a time, {str(ns['device']).partition(':')[0]}"
        claims = [(f"A step of W⊥-NS is faster than one of W⊥ by SVD ({place}).", "step_ms", "ms", (0.0, 1.0))]
        if ns["width"] == 512 and ns.get("peak_mb") and svd.get("peak_mb"):
            says = f"W⊥-NS needs about a tenth of the memory, between 0.05 and 0.2 ({place})."
            claims.append((says, "peak_mb", "MB", (0.05, 0.2)))
        for says, quantity, unit, (low, high) in claims:
            row: dict[str, Any] = {"The paper says": says}
            for name, value in (("W⊥-NS", ns[quantity]), ("W⊥ by SVD", svd[quantity])):
                row[name] = Cell(f"{value:,.{1 if value < 100 else 0}f} {unit}", value)
            ratio = ns[quantity] / svd[quantity]
            yield {**row, "Ratio": ratio, "Verdict": HOLDS if low < ratio < high else DIFFERS}


# --- tables of the docs ---


def ratio_cell(ratio: float) -> Cell:
    return cell(ratio, ".3g" if ratio < 1000 else ",.0f")


@table("times")
def times_table(record: Record) -> Iterable[Row]:
    """Ratio of a step to backpropagation's, by method and width; of backpropagation the time."""
    rows = sorted(record["rows"], key=lambda row: (row["method"] != "backprop", row["width"]))
    parts = {row["method"]: row["scaled_from"] for row in reversed(rows)}  # at the smallest width
    cells = []
    for row in sorted(record["rows"], key=lambda row: row["method"] != "backprop"):
        part, base = parts[row["method"]], row["method"] == "backprop"
        scaled = f" (one step on {part} samples × {row['batch'] // part})" if part else ""
        value = f"{row['step_ms']:.3g} ms" if base else ratio_cell(row["ratio"])
        cells.append((method_label(row["method"]) + scaled, f"width {row['width']}", value))
    return matrix("", cells)


@table("memory")
def memory_table(record: Record) -> Iterable[Row]:
    """Peak memory without the parameters' gradients, and time over backpropagation's, by method and depth."""
    rows, base = record["rows"], _base(record, "depth")
    memory = [(row, f"depth {row['depth']}", f"{row['peak_mb'] - row['gradients_mb']:.0f} MB") for row in rows]
    times = [(row, f"time, {row['depth']}", f"{row['step_ms'] / base[row['depth']]:.2f}") for row in rows]
    return matrix("", ((method_label(row["method"]), title, value) for row, title, value in memory + times))


@table("compiled")
def compiled_matrix(record: Record) -> Iterable[Row]:
    """By task and method, in the last mode that each has: time over backpropagation's in its last mode, peak memory."""
    modes, rows = _modes(record), record["rows"]
    last = {(row["task"], row["method"]): row for mode in modes for row in rows if row["mode"] == mode}
    cells = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        row, base = last[task, method], method == "backprop"
        time = f"{row['step_ms']:.3g} ms" if base else f"{row['ratios'][modes[-1]]:.2f}"
        title = method_label(method) + (f", {MODES[modes[-1]]}" if base else "")
        cells.append((task, title, f"{time}, {row['peak_mb']:.0f} MB"))
    return matrix("", cells)


@table("cost-students", "What a step costs", forms={"ms": ".1f", "Peak, MB": ".0f"})
def students_table(record: Record) -> Iterator[Row]:
    """A step of each way to train a deep network, and over backpropagation's with the same network, uncompiled."""
    base = _base(record, "task")
    for row in record["rows"]:
        yield {
            "": method_label(row["method"]),
            "Network": row["task"],
            "Pieces": row["sites"] if row["sites"].isdecimal() else "–",
            "Compiled": row["compiled"],
            "ms": row["step_ms"],
            "Over backpropagation, uncompiled": ratio_cell(row["step_ms"] / base[row["task"]]),
            "Peak, MB": row.get("peak_mb"),
        }
