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
from gradguess_lab.bench.apart import Timing, fewer, in_turns, peak
from gradguess_lab.bench.loops import BACKPROP, Replayed, Times, make_loop, measure
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
    device = cases[0].device
    return keep(make_record("time", rows, device, load) | {"growth": fits}, out, f"time-{kind_of(device)}")


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
    record = make_record("memory", rows, case.device, load) | {"growth": slopes(rows)}
    return keep(record, out, f"memory-{kind_of(case.device)}")


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
    results = Results("compiled" if compile else "tasks", device, settings, out)
    done = {row["task"] for row in results.rows}
    # what is not studied on real networks is cut as in a comparison
    cut = [name for name in chosen if entry_of(name).pieces and "real" not in entry_of(name).tried]
    left = [
        Timing(name, task, **settings, own={method: TASKS[name].settings(method) for method in cut})
        for name, task in _tasks(names, device).items()
        if name not in done
    ]
    failures = []
    if left:
        say(f"timing {', '.join(one.name for one in left)}")
    for name, found in in_turns(left, max(1, jobs)):
        if isinstance(found, GradguessError):
            failures.append(str(found))
        else:
            say(f"timed {name}")
            results.add(found)
    if failures:
        raise GradguessError("; ".join(failures))
    return results.record()


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
    results = Results("starts", device, {}, out)
    done = {(row["task"], row["method"]) for row in results.rows}
    for (name, task), method in itertools.product(_tasks(names, device).items(), _checked(methods, "starts")):
        if (name, method) in done:
            continue
        row: Row = {"task": name, "method": method, "device": device}
        with tempfile.TemporaryDirectory() as cache:
            for which in ("first", "second"):
                say(f"{name}, {method}: {which} start")
                timing = Timing(name, task, [method], compile=True)
                row[f"{which}_s"] = timing.apart("start", {"TORCHINDUCTOR_CACHE_DIR": cache})
        results.add([row])
    return results.record()


def _checked(names: Sequence[str], experiment: str) -> list[str]:
    """The names that were asked for, each of them known; those that the experiment tries if none were."""
    for name in names:
        entry_of(name)
    return list(names) or tried_by(experiment)


def _tasks(names: Sequence[str], device: str) -> dict[str, TrainConfig]:
    chosen = {name: lookup(TASKS, name, "task").config for name in names or used_in("real")}
    return {name: dataclasses.replace(config, device=device) for name, config in chosen.items()}


def _settings(case: TrainConfig) -> Row:
    return {name: getattr(case, name) for name in SETTINGS}


def _time_case(case: TrainConfig, names: Sequence[str], seconds: float, samples: int) -> list[Row]:
    slow = [name for name in names if kind_of(case.device) in entry_of(name).slow]
    fast = [BACKPROP, *(name for name in names if name not in slow)]
    loops = {name: make_loop(name, case) for name in fast}  # as steps are run without being asked: on a GPU captured
    times = measure({name: Replayed(loop) if loop.x.is_cuda else loop for name, loop in loops.items()}, seconds)
    base, part = times[BACKPROP], fewer(case, samples)
    rows = [_row(name, case, times[name], base) for name in fast]
    for name in slow:
        loop = make_loop(name, part)
        loop.seconds(1)  # the second step of a loop that is too slow for rounds
        took = loop.seconds(1) * case.batch / part.batch
        row = _row(name, case, Times(plain=[took]), base)
        rows.append(row | {"ratio": took / base.step, "scaled_from": part.batch})
    return rows


def _row(name: str, case: TrainConfig, times: Times, base: Times) -> Row:
    return {"method": name, **_settings(case), **times.row(base), "scaled_from": None, "peak_mb": None}


def growth(rows: Sequence[Row], axis: str) -> list[Row]:
    """The exponent `a` in `time ~ axis^a`, where nothing but the axis differs, from the quietest rounds."""
    others = [name for name in SETTINGS if name != axis]
    same = [row for row in rows if all(row[name] == rows[0][name] for name in others)]
    return _slopes("exponent", axis, [(row["method"], *np.log([row[axis], row["quiet_ms"]])) for row in same])


def slopes(rows: Sequence[Row]) -> list[Row]:
    """Megabytes that one more layer costs, without the gradients of its parameters."""
    return _slopes(
        "mb_per_layer", "depth", [(row["method"], row["depth"], row["peak_mb"] - row["gradients_mb"]) for row in rows]
    )


def _slopes(name: str, axis: str, points: Iterable[tuple[str, float, float]]) -> list[Row]:
    """The slope over the axis of each method with more than one point, under this name."""
    series: dict[str, dict[float, float]] = {}
    for method, x, y in points:
        series.setdefault(method, {})[x] = y
    return [
        {"method": method, "axis": axis, name: float(np.polyfit(list(line), list(line.values()), 1)[0]),
         "points": len(line)}
        for method, line in series.items()
        if len(line) > 1
    ]  # fmt: skip


def make_record(kind: str, rows: Sequence[Row], device: str, load: float) -> Row:
    """The rows, with the environment; `load` is that of the machine before they were measured."""
    where = {**environment.describe(device), "load_before": load, "load_after": os.getloadavg()[0]}
    return {"schema": SCHEMA, "kind": kind, "environment": where, "rows": list(rows), "growth": []}


def keep(record: Row, out: Path | None, name: str) -> Row:
    """Write the record to a directory, if there is one."""
    if out is not None:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{name}.json", record)
    return record


def kind_of(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none of PyTorch's.") from error


class Results:
    """The rows of a record, written whenever some are added.

    They begin with those that an earlier call with the same code, machine and settings has left.
    """

    def __init__(self, kind: str, device: str, settings: Row, out: Path | None, name: str = "") -> None:
        self.kind, self.device, self.settings, self.out = kind, device, settings, out
        self.name, self.load = name or f"{kind}-{kind_of(device)}", os.getloadavg()[0]
        stored = (find(out, self.name) if out else None) or {}
        where = {key: value for key, value in stored.get("environment", {}).items() if not key.startswith("load")}
        same = where == environment.describe(device) and stored.get("settings") == settings
        self.rows: list[Row] = list(stored["rows"]) if same else []

    def add(self, rows: Sequence[Row]) -> None:
        """Take up more rows, in the order of the tasks."""
        self.rows = sorted([*self.rows, *rows], key=lambda row: list(TASKS).index(row["task"]))
        self.record()

    def record(self) -> Row:
        record = make_record(self.kind, self.rows, self.device, self.load) | {"settings": self.settings}
        return keep(record, self.out, self.name)
