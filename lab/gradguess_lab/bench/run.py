"""The benchmarks on the paper's network: time per step over settings, memory per step over the depth."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from gradguess_lab.bench import memory as probe
from gradguess_lab.bench.cases import Case, fewer
from gradguess_lab.bench.loops import Replayed
from gradguess_lab.bench.record import Row, Say, keep, kind_of, make_record
from gradguess_lab.bench.registry import BACKPROP, MEASURED, PER_SAMPLE, TIMED, check_methods, make_loop
from gradguess_lab.bench.timing import Times, measure, measure_once

AXES = ("width", "depth", "batch", "k")


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
    record = make_record("time", rows, cases[0].device, load)
    record["growth"] = [fit for axis in AXES for fit in growth(rows, axis)]
    return keep(record, out, f"time-{kind_of(cases[0].device)}.json")


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
    record = make_record("memory", rows, case.device, load)
    record["growth"] = slopes(rows)
    return keep(record, out, f"memory-{kind_of(case.device)}.json")


def _time_case(case: Case, names: Sequence[str], seconds: float, samples: int) -> list[Row]:
    slow = [name for name in names if name in PER_SAMPLE.get(kind_of(case.device), PER_SAMPLE["cpu"])]
    fast = [BACKPROP, *(name for name in names if name not in slow)]
    loops = {name: make_loop(name, case) for name in fast}  # as steps are run without being asked: on a GPU captured
    times = measure({k: Replayed(v) if v.x.is_cuda else v for k, v in loops.items()}, seconds, case.device)
    base = times[BACKPROP]
    rows = [_row(name, case, times[name], base) for name in fast]
    return rows + [_slow_row(name, case, base, samples) for name in slow]


def _row(name: str, case: Case, times: Times, base: Times) -> Row:
    return {
        "method": name,
        **dataclasses.asdict(case),
        **times.row(base),
        "scaled_from": None,
        "peak_mb": None,
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
    return [
        {"method": method, "axis": axis, "exponent": _slope(np.log(points)), "points": len(points)}
        for method, points in _series(rows, axis).items()
        if len(points) > 1
    ]


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
        {"method": method, "axis": "depth", "mb_per_layer": _slope(np.array(points)), "points": len(points)}
        for method, points in series.items()
        if len(dict(points)) > 1
    ]


def _slope(points: np.ndarray) -> float:
    from scipy import stats

    return float(stats.linregress(points[:, 0], points[:, 1]).slope)


def _threads() -> int:
    return torch.get_num_threads()
