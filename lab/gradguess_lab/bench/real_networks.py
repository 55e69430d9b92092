"""The benchmarks on real networks: time and memory of a step, and the start of a compiled run."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradguess_lab.bench import tasks
from gradguess_lab.bench.memory import run_apart
from gradguess_lab.bench.record import Row, Say, keep, kind_of, make_record, measured
from gradguess_lab.bench.registry import BACKPROP, check_methods
from gradguess_lab.bench.tasks import Job, default_methods
from gradguess_lab.bench.turns import failed, in_turns
from gradguess_lab.config import TrainConfig
from gradguess_lab.names import lookup
from gradguess_lab.real import TASKS as REAL

PAPER = {f"paper-{width}": TrainConfig(width=width) for width in (64, 128, 512, 1024)}  # the paper's network
TASKS = REAL | PAPER
STARTED = (BACKPROP, "wperp", "feedback-chained-rare")


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

    What `out` holds of the same code, machine and settings is not measured again.

    Args:
        names: of tasks, by default all real networks. `paper-512` is the paper's network of that width.
        methods: beside backpropagation. By default those of the study of real networks, or with `compile` a few.
        seconds: of timing for each loop.
        compile: run each method compiled as well, on a GPU also captured.
        jobs: processes that compile at a time. Only one is timed at a time.
        memory: also measure the peak memory.
        out: directory for `tasks-DEVICE.json`, or with `compile` for `compiled-DEVICE.json`.
    """
    chosen = list(check_methods(methods, default_methods(compile)))
    settings: Row = {"methods": chosen, "compile": compile, "seconds": seconds, "memory": memory}
    results = _Results("compiled" if compile else "tasks", device, settings, out)
    left = {
        name: Job(name, task, **settings)
        for name, task in _tasks(names, device).items()
        if all(row["task"] != name for row in results.rows)
    }
    failures = {}
    for name, found in in_turns(left, max(1, jobs), say):
        if isinstance(found, str):
            failures[name] = found
        else:
            results.add(found)
    if failures:
        raise failed(failures)
    return results.keep()


def bench_starts(
    names: Sequence[str] = (),
    methods: Sequence[str] = (),
    device: str = "cpu",
    out: Path | None = None,
    say: Say = lambda words: None,
) -> Row:
    """Seconds until every kind of step is compiled: with an empty cache, and in a second process that finds it filled.

    What `out` holds of the same code and machine is not measured again. The record is `starts-DEVICE.json`.
    """
    results = _Results("starts", device, {}, out)
    done = {(row["task"], row["method"]) for row in results.rows}
    for name, task in _tasks(names, device).items():
        for method in check_methods(methods, STARTED):
            if (name, method) in done:
                continue
            command = [tasks.__name__, "start", Job(name, task, [method], compile=True, seconds=0).as_json()]
            with tempfile.TemporaryDirectory() as cache:
                variables = {"TORCHINDUCTOR_CACHE_DIR": cache}
                say(f"{name}, {method}: first start")
                first = run_apart(name, command, variables)
                say(f"{name}, {method}: second start")
                second = run_apart(name, command, variables)
            results.add([{"task": name, "method": method, "device": device, "first_s": first, "second_s": second}])
    return results.keep()


def _tasks(names: Sequence[str], device: str) -> dict[str, TrainConfig]:
    return {name: dataclasses.replace(lookup(TASKS, name, "task"), device=device) for name in names or REAL}


class _Results:
    """The rows so far, in the order of the tasks, and written whenever some are added."""

    def __init__(self, kind: str, device: str, settings: Row, out: Path | None) -> None:
        self.kind, self.device, self.settings, self.out = kind, device, settings, out
        self.name, self.load = f"{kind}-{kind_of(device)}.json", os.getloadavg()[0]
        self.rows = measured(out, self.name, device, settings)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows = sorted([*self.rows, *rows], key=lambda row: list(TASKS).index(row["task"]))
        self.keep()

    def keep(self) -> Row:
        record = make_record(self.kind, self.rows, self.device, self.load)
        return keep(record | {"settings": self.settings, "growth": []}, self.out, self.name)
