"""The benchmarks: time per step over settings, memory over the depth, real networks, and the start of compiled runs.

Each leaves one JSON file with its rows and where they were measured. What a folder holds of the same code, machine and
settings is not measured again where that takes long.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradguess.errors import GradguessError, InputError
from gradguess_lab import environment
from gradguess_lab.bench.apart import Timing, in_turns, peak, run_apart
from gradguess_lab.bench.loops import BACKPROP, Replayed, fewer, make_loop
from gradguess_lab.bench.timing import Times, measure, measure_once
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import explained, write_json
from gradguess_lab.methods import entry_of, tried_by
from gradguess_lab.names import lookup
from gradguess_lab.store import find
from gradguess_lab.tasks import TASKS, used_in

SCHEMA = 1
AXES = ("width", "depth", "batch", "k")
SETTINGS = (*AXES, "dtype", "device")
Row = dict[str, Any]
Say = Callable[[str], None]


def grid(**axes: Iterable[Any]) -> list[TrainConfig]:
    """The paper's network with every combination of the given values.

    >>> [case.width for case in grid(width=[64, 128], depth=[3])]
    [64, 128]
    """
    return [TrainConfig(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def bench_time(
    cases: Sequence[TrainConfig],
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
    names = [name for name in _checked(methods, "time") if name != BACKPROP]  # it is always timed
    load, rows = os.getloadavg()[0], list[Row]()
    for case in cases:
        say(f"width {case.width}, depth {case.depth}, batch {case.batch}, k {case.k}, {case.dtype}, {case.device}")
        found = _time_case(case, names, seconds, samples)
        for row in found if memory else ():
            seen = fewer(case, samples) if row["scaled_from"] else case
            row["peak_mb"] = peak(row["method"], seen, timed=False)["peak_mb"]
        rows += found
    fits = [fit for axis in AXES for fit in growth(rows, axis)]
    return keep(make_record("time", rows, cases[0].device, load) | {"growth": fits}, out, "time", cases[0].device)


def bench_memory(
    depths: Iterable[int],
    case: TrainConfig,
    methods: Sequence[str] = (),
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Peak memory and time per step against the depth, each measurement in a process of its own."""
    names, load, rows = _checked(methods, "memory"), os.getloadavg()[0], list[Row]()
    for depth, method in itertools.product(depths, names):
        deep = dataclasses.replace(case, depth=depth)
        say(f"depth {depth}: {method}")
        rows.append({"method": method, **_settings(deep), **peak(method, deep)})
    return keep(make_record("memory", rows, case.device, load) | {"growth": slopes(rows)}, out, "memory", case.device)


def bench_tasks(
    names: Sequence[str] = (),
    methods: Sequence[str] = (),
    seconds: float = 3.0,
    device: str = "cpu",
    compile: bool = False,
    jobs: int = 1,
    memory: bool = False,
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Time per step on real networks, and where asked for its peak memory, each in a process of its own.

    Args:
        names: of tasks, by default all real networks. `paper-512` is the paper's network of that width.
        methods: beside backpropagation. By default those of the study of real networks, or with `compile` a few.
        seconds: of timing for each loop.
        compile: run each method compiled as well, on a GPU also captured.
        jobs: processes that compile at a time. Only one is timed at a time.
        memory: also measure the peak memory.
        out: directory for `tasks-DEVICE.json`, or with `compile` for `compiled-DEVICE.json`.
    """
    default = [name for name in tried_by("real") if name != BACKPROP and not entry_of(name).control]
    chosen = _checked(methods, "compiled") if methods or compile else default
    settings: Row = {"methods": chosen, "compile": compile, "seconds": seconds, "memory": memory}
    results = _Results("compiled" if compile else "tasks", device, settings, out)
    done = {row["task"] for row in results.rows}
    # what is not studied on real networks is cut as in a comparison
    cut = [name for name in chosen if entry_of(name).pieces and "real" not in entry_of(name).tried]
    left = [
        Timing(name, task, **settings, own={method: TASKS[name].settings(method) for method in cut})
        for name, task in _tasks(names, device).items()
        if name not in done
    ]
    failures = {}
    for name, found in in_turns(left, max(1, jobs), say):
        if isinstance(found, str):
            failures[name] = found
        else:
            results.add(found)
    if failures:
        raise GradguessError("; ".join(f"timing {name} failed: {why}" for name, why in failures.items()))
    return results.keep()


def bench_starts(
    names: Sequence[str] = (),
    methods: Sequence[str] = (),
    device: str = "cpu",
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Seconds until every kind of step is compiled: with an empty cache, and in a second process that finds it filled.

    The record is `starts-DEVICE.json`.
    """
    results = _Results("starts", device, {}, out)
    done = {(row["task"], row["method"]) for row in results.rows}
    for (name, task), method in itertools.product(_tasks(names, device).items(), _checked(methods, "starts")):
        if (name, method) in done:
            continue
        row: Row = {"task": name, "method": method, "device": device}
        with tempfile.TemporaryDirectory() as cache:
            for which in ("first", "second"):
                say(f"{name}, {method}: {which} start")
                asked = Timing(name, task, [method], compile=True).plain()
                row[f"{which}_s"] = run_apart(name, "start", asked, {"TORCHINDUCTOR_CACHE_DIR": cache})
        results.add([row])
    return results.keep()


def _checked(names: Sequence[str], experiment: str) -> list[str]:
    """The names that were asked for, each of them known; those that the experiment tries if none were."""
    for name in names:
        entry_of(name)
    return list(names) or tried_by(experiment)


def _tasks(names: Sequence[str], device: str) -> dict[str, TrainConfig]:
    chosen = {name: lookup(TASKS, name, "task").config for name in names or used_in("real")}
    return {name: dataclasses.replace(config, device=device) for name, config in chosen.items()}


# --- one case --------------------------------------------------------------------------------------------------------


def _settings(case: TrainConfig) -> Row:
    return {name: getattr(case, name) for name in SETTINGS}


def _time_case(case: TrainConfig, names: Sequence[str], seconds: float, samples: int) -> list[Row]:
    slow = [name for name in names if kind_of(case.device) in entry_of(name).slow]
    fast = [BACKPROP, *(name for name in names if name not in slow)]
    loops = {name: make_loop(name, case) for name in fast}  # as steps are run without being asked: on a GPU captured
    times = measure({k: Replayed(v) if v.x.is_cuda else v for k, v in loops.items()}, seconds, case.device)
    base, part = times[BACKPROP], fewer(case, samples)
    rows = [_row(name, case, times[name], base) for name in fast]
    for name in slow:
        took = measure_once(make_loop(name, part), case.device) * case.batch / part.batch
        row = _row(name, case, Times(plain=[took]), base)
        rows.append(row | {"ratio": took / base.step, "scaled_from": part.batch})
    return rows


def _row(name: str, case: TrainConfig, times: Times, base: Times) -> Row:
    return {"method": name, **_settings(case), **times.row(base), "scaled_from": None, "peak_mb": None}


def growth(rows: Sequence[Row], axis: str) -> list[Row]:
    """The exponent `a` in `time ~ axis^a`, where nothing but the axis differs, from the quietest rounds."""
    others = [name for name in SETTINGS if name != axis]
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        if all(row[name] == rows[0][name] for name in others):
            series.setdefault(row["method"], {})[row[axis]] = row["quiet_ms"]
    return [
        {"method": method, "axis": axis, "exponent": _slope(np.log(list(points.items()))), "points": len(points)}
        for method, points in series.items()
        if len(points) > 1
    ]


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
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


# --- what a benchmark leaves -----------------------------------------------------------------------------------------


def make_record(kind: str, rows: Sequence[Row], device: str, load: float) -> Row:
    """The rows, with the environment; `load` is that of the machine before they were measured."""
    where = {**environment.describe(device), "load_before": load, "load_after": os.getloadavg()[0]}
    return {"schema": SCHEMA, "kind": kind, "environment": where, "rows": list(rows), "growth": []}


def keep(record: Row, out: Path | None, name: str, device: str = "") -> Row:
    """Write the record to a directory, if there is one."""
    if out is not None:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
        write_json(out / (f"{name}-{kind_of(device)}.json" if device else f"{name}.json"), record)
    return record


def measured(out: Path | None, name: str, device: str, settings: Row) -> list[Row]:
    """The rows that an earlier call with the same code, machine and settings has left."""
    stored = find(out, name) if out else None
    if stored is None:
        return []
    where = {key: value for key, value in stored.get("environment", {}).items() if not key.startswith("load")}
    same = where == environment.describe(device) and stored.get("settings") == settings
    return list(stored["rows"]) if same else []


def kind_of(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none of PyTorch's.") from error


class _Results:
    """The rows so far, in the order of the tasks, and written whenever some are added."""

    def __init__(self, kind: str, device: str, settings: Row, out: Path | None) -> None:
        self.kind, self.device, self.settings, self.out = kind, device, settings, out
        self.load = os.getloadavg()[0]
        self.rows = measured(out, f"{kind}-{kind_of(device)}", device, settings)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows = sorted([*self.rows, *rows], key=lambda row: list(TASKS).index(row["task"]))
        self.keep()

    def keep(self) -> Row:
        record = make_record(self.kind, self.rows, self.device, self.load) | {"settings": self.settings}
        return keep(record, self.out, self.kind, self.device)
