"""The benchmarks: time per step over settings, memory per step over the depth, real networks. One JSON file each."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from gradguess.errors import InputError
from gradguess.experiments import environment
from gradguess.experiments.bench import memory as probe
from gradguess.experiments.bench.loops import (
    BACKPROP,
    MEASURED,
    PER_SAMPLE,
    TIMED,
    Case,
    check_methods,
    fewer,
    make_loop,
)
from gradguess.experiments.bench.tasks import time_task
from gradguess.experiments.bench.timing import Times, measure, measure_once
from gradguess.experiments.files import explained, write_json
from gradguess.experiments.real import TASKS

SCHEMA = 1
AXES = ("width", "depth", "batch", "k")
Row = dict[str, Any]
Say = Callable[[str], None]


def bench_time(
    cases: Sequence[Case],
    methods: Sequence[str] = (),
    seconds: float = 3.0,
    samples: int = 2,
    memory: bool = True,
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Time (and peak memory) per step of every method in every case.

    Args:
        seconds: of timing for each method and case.
        samples: dense per-sample methods run one step on so many samples; their time is scaled to the batch.
        memory: also measure the peak memory, in subprocesses.
        out: directory for `time-DEVICE.json`.
    """
    names = tuple(name for name in check_methods(methods, TIMED) if name != BACKPROP)  # it is always timed
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for case in cases:
        say(f"width {case.width}, depth {case.depth}, batch {case.batch}, k {case.k}, {case.dtype}, {case.device}")
        rows += _time_case(case, names, seconds, samples)
        if memory:
            _add_memory(rows[-len(names) - 1 :], case, samples)
    record = _record("time", rows, cases[0].device, load)
    record["growth"] = [fit for axis in AXES for fit in growth(rows, axis)]
    return _keep(record, out, f"time-{_kind(cases[0].device)}.json")


def bench_memory(
    depths: Iterable[int],
    case: Case,
    methods: Sequence[str] = (),
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Peak memory and time per step against the depth, each measurement in a process of its own."""
    names = check_methods(methods, MEASURED)
    load = os.getloadavg()[0]
    rows = []
    for depth in depths:
        deep = dataclasses.replace(case, depth=depth)
        for method in names:
            say(f"depth {depth}: {method}")
            rows.append({"method": method, **dataclasses.asdict(deep), **probe.peak(method, deep, _threads())})
    record = _record("memory", rows, case.device, load)
    record["growth"] = slopes(rows)
    return _keep(record, out, f"memory-{_kind(case.device)}.json")


def bench_tasks(
    names: Sequence[str] = (),
    seconds: float = 3.0,
    device: str = "cpu",
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Time per step of the variants of the study of real networks, on the tasks of these names (all by default)."""
    load = os.getloadavg()[0]
    rows = []
    for name in names or TASKS:
        say(name)
        times = time_task(name, seconds, device)
        for variant, one in times.items():
            rows.append({"method": variant, "task": name, "device": device, **_times(one, times[BACKPROP])})
    record = _record("tasks", rows, device, load)
    record["growth"] = []
    return _keep(record, out, f"tasks-{_kind(device)}.json")


def _time_case(case: Case, names: Sequence[str], seconds: float, samples: int) -> list[Row]:
    slow = [name for name in names if name in PER_SAMPLE.get(_kind(case.device), PER_SAMPLE["cpu"])]
    fast = [BACKPROP, *(name for name in names if name not in slow)]
    times = measure({name: make_loop(name, case) for name in fast}, seconds, case.device)
    base = times[BACKPROP]
    rows = [_row(name, case, times[name], base) for name in fast]
    return rows + [_slow_row(name, case, base, samples) for name in slow]


def _row(name: str, case: Case, times: Times, base: Times) -> Row:
    return {
        "method": name,
        **dataclasses.asdict(case),
        **_times(times, base),
        "scaled_from": None,
        "peak_mb": None,
    }


def _times(times: Times, base: Times) -> Row:
    return {
        "step_ms": 1e3 * times.step,
        "quiet_ms": 1e3 * times.quiet,
        "refresh_ms": 1e3 * times.refresh,
        "ratio": times.ratio(base),
        "quiet_ratio": times.quiet / base.quiet,
        "rounds": len(times.plain),
    }


def _slow_row(name: str, case: Case, base: Times, samples: int) -> Row:
    part = fewer(case, samples)
    seconds = measure_once(make_loop(name, part), case.device) * case.batch / part.batch
    times = Times(plain=[seconds])
    return {**_row(name, case, times, base), "ratio": seconds / base.step, "scaled_from": part.batch}


def _add_memory(rows: Sequence[Row], case: Case, samples: int) -> None:
    for row in rows:
        seen = fewer(case, samples) if row["scaled_from"] else case
        row["peak_mb"] = probe.peak(row["method"], seen, _threads(), timed=False)["peak_mb"]


def growth(rows: Sequence[Row], axis: str) -> list[Row]:
    """The exponent `a` in `time ~ axis^a`, where nothing but the axis differs, from the quietest rounds."""
    fits = []
    for method, points in _series(rows, axis).items():
        if len(points) > 1:
            fits.append({"method": method, "axis": axis, "exponent": _slope(points, log=True), "points": len(points)})
    return fits


def _series(rows: Sequence[Row], axis: str) -> dict[str, list[tuple[float, float]]]:
    """(axis, time) of each method, at the first row's values of the other axes."""
    others = [name for name in (*AXES, "dtype", "device") if name != axis]
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        if all(row[name] == rows[0][name] for name in others):
            series.setdefault(row["method"], {})[row[axis]] = row["quiet_ms"]
    return {method: sorted(points.items()) for method, points in series.items()}


def slopes(rows: Sequence[Row]) -> list[Row]:
    """Megabytes that one more layer costs, without the gradients of its parameters."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["method"], []).append((row["depth"], row["peak_mb"] - row["gradients_mb"]))
    return [
        {"method": method, "axis": "depth", "mb_per_layer": _slope(points, log=False), "points": len(points)}
        for method, points in series.items()
        if len(points) > 1
    ]


def _slope(points: Sequence[tuple[float, float]], log: bool) -> float:
    """The slope of the least-squares line.

    >>> _slope([(1, 1), (2, 4), (4, 16)], log=True)
    2.0
    """
    pairs = [(math.log(x), math.log(y)) for x, y in points] if log else list(points)
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else 0.0


def _record(kind: str, rows: Sequence[Row], device: str, load: float) -> Row:
    where = {**environment.describe(device), "load_before": load, "load_after": os.getloadavg()[0]}
    return {"schema": SCHEMA, "kind": kind, "environment": where, "rows": list(rows)}


def _keep(record: Row, out: Path | None, name: str) -> Row:
    if out is not None:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
        write_json(out / name, record)
    return record


def _kind(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none of PyTorch's.") from error


def _threads() -> int:
    return torch.get_num_threads()
