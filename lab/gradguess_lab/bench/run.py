"""The benchmarks: what a training step of each method costs in time and memory, beside backpropagation.

All loops of a case, a network on data, are timed in turns in one process, which measures nothing else. Memory on a CPU
needs another process. A record holds a row for each case, method and mode, and where they were measured. What a folder
holds of the same code, machine and settings is not measured again.

The kinds of benchmarks: `time` and `memory` of the paper's network, over its sizes; `tasks`, networks of the registry;
`compiled`, the same in all `MODES`; `starts`, seconds until every kind of step is compiled, with an empty cache and in
a second process that finds it filled; `compare`, what a comparison asks for.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradguess.errors import GradguessError, InputError
from gradguess_lab import environment
from gradguess_lab.bench.loops import BACKPROP, Loop, make_loop, measure
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import explained, write_json
from gradguess_lab.methods import entry_of, tried_by
from gradguess_lab.store import find
from gradguess_lab.tasks import TASKS

SCHEMA = 1
AXES = ("width", "depth", "batch", "k")
SETTINGS = (*AXES, "dtype", "device")
MODES = {  # how the operations of a step are started -> (compiled, captured)
    "eager": (False, False),
    "captured": (False, True),
    "compiled": (True, False),
    "compiled-captured": (True, True),
}
# glibc keeps freed blocks for itself, more of them the more often a loop allocates. With these settings they go back at
# once, so that the resident set is what the loop holds. That is slow, so times are taken in another process.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
Row = dict[str, Any]
Say = Callable[[str], None]


def grid(**axes: Iterable[Any]) -> dict[str, TrainConfig]:
    """The paper's network with every combination of the given values, by key.

    >>> list(grid(width=[64, 128], depth=[3]))
    ['wperp-w64-s0', 'wperp-w128-s0']
    """
    cases = [TrainConfig(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return {case.key: case for case in cases}


def bench(
    kind: str,
    cases: Mapping[str, TrainConfig],
    methods: Sequence[str] = (),
    seconds: float = 3.0,
    samples: int = 2,
    memory: bool = False,
    jobs: int = 1,
    out: Path | None = None,
    say: Say = lambda words: None,
    name: str = "",
) -> Row:
    """The record of a benchmark.

    Args:
        cases: by name, all on one device.
        methods: beside backpropagation. By default those that the registry names for this kind.
        seconds: of timing for each loop; memory and starts need none.
        samples: `time`: of a step of methods with a matrix for each sample; their time is scaled to the batch.
        memory: also measure the peak memory.
        jobs: processes that compile at a time. Only one is timed at a time.
        out: directory for the record, a JSON file.
        name: of that file, by default `KIND-DEVICE`.
    """
    device, load = next(iter(cases.values())).device, os.getloadavg()[0]
    seconds = 0.0 if kind in ("memory", "starts") else seconds
    tried = [one for one in tried_by("real" if kind == "tasks" else kind) if not entry_of(one).control]
    chosen = [one for one in methods or tried if entry_of(one)]
    settings: Row = {"methods": chosen, "seconds": seconds, "samples": samples, "memory": memory}
    name, record = name or f"{kind}-{kind_of(device)}", make_record(kind, [], device, load) | {"settings": settings}
    stored = (find(out, name) if out else None) or {}
    if stored.get("settings") == settings and _where(stored) == _where(record):
        keys = {task: config.key for task, config in cases.items()}
        rows = [row for row in stored["rows"] if row["case"] == keys.get(row["task"], row["case"])]
        record |= {"rows": rows, "growth": stored["growth"]}
    done = {(row["task"], row["method"]) for row in record["rows"]}
    together = [[one] for one in chosen] if kind == "starts" else [list(dict.fromkeys((BACKPROP, *chosen)))]
    left = [
        Case(kind, task, config, some, _modes(kind, device), seconds, samples, memory)
        for task, config in cases.items()
        for some in together
        if (task, some[0]) not in done
    ]
    failures, order = [], {known: place for place, known in enumerate(TASKS)}
    for case, found in in_turns(left, max(1, jobs)):
        if isinstance(found, GradguessError):
            failures.append(str(found))
            continue
        say(f"measured {case.name}")
        rows = sorted([*record["rows"], *found], key=lambda row: order.get(row["task"], len(order)))
        record |= {"rows": rows, "growth": growth(kind, rows) if kind in FITS else []}
        record["environment"]["load_after"] = os.getloadavg()[0]
        keep(record, out, name)
    if failures:
        raise GradguessError("; ".join(failures))
    return record


def _modes(kind: str, device: str) -> list[str]:
    """All that there are, or the usual one: on a GPU steps are captured."""
    cuda = kind_of(device) == "cuda"
    if kind == "compiled":
        return [mode for mode, (_, captures) in MODES.items() if cuda or not captures]
    return [{"starts": "compiled", "memory": "eager"}.get(kind, "captured" if cuda else "eager")]


@dataclass(frozen=True)
class Case:
    """The loops of a network that take turns in a process: each method in each mode."""

    kind: str
    name: str
    config: TrainConfig
    methods: Sequence[str]
    modes: Sequence[str]
    seconds: float = 0.0
    samples: int = 2
    memory: bool = False

    @property
    def cuda(self) -> bool:
        return kind_of(self.config.device) == "cuda"

    def loops(self) -> dict[tuple[str, str], Loop]:
        """(method, mode) -> loop. A loop and its captured twin share the network and what is compiled."""
        loops: dict[tuple[str, str], Loop] = {}
        for method in self.methods:
            entry, made = entry_of(method), dict[bool, Loop]()
            slow = self.kind == "time" and kind_of(self.config.device) in entry.slow
            # what is not studied on real networks is cut as in a comparison
            cut = entry.pieces and self.name in TASKS and (self.kind == "compare" or "real" not in entry.tried)
            own = TASKS[self.name].settings(method) if cut else {}
            for mode in self.modes:
                compiled, captured = MODES[mode]
                # of checkpoints the compiler chooses by itself what is recomputed
                if compiled and entry.settings["method"] == "checkpointed":
                    continue
                if compiled not in made:
                    made[compiled] = make_loop(method, self.config, compiled, own, self.samples * slow)
                loops[method, mode] = made[compiled].replayed() if captured and not slow else made[compiled]
        return loops

    def peaks(self) -> list[float]:
        """The peak memory of each loop, in this process."""
        return [peak_here(loop) for loop in self.loops().values()]

    def rows(self, locks: str = "") -> list[Row]:
        """For each method in each mode time, its ratios to backpropagation in each of its modes, and memory.

        Loops are timed while no other process is timed or compiles that has the same folder of `locks`.
        """
        with (Path(locks) / "machine" if locks else Path(os.devnull)).open("a") as machine:
            if locks:
                fcntl.flock(machine, fcntl.LOCK_SH)
                one_chooses(Path(locks) / "choosing")
            loops = self.loops()
            times = measure(loops, self.seconds, lambda: fcntl.flock(machine, fcntl.LOCK_EX) if locks else None)
            peaks: list[Any] = [None] * len(loops)
            if self.memory:
                peaks = [peak_here(loop) for loop in loops.values()] if self.cuda else run_apart(self, "peaks", EXACT)
        rows = []
        for ((method, mode), found), loop, peak in zip(times.items(), loops.values(), peaks, strict=True):
            bases = {other: times[BACKPROP, other] for other in self.modes if (BACKPROP, other) in times}
            rows.append({
                "method": method,
                "task": self.name,
                "case": self.config.key,
                "mode": mode,
                **{name: getattr(self.config, name) for name in SETTINGS},
                **found.row(bases.get(self.modes[0], found)),
                "ratios": {other: found.ratio(base) for other, base in bases.items()},
                "peak_mb": peak,
                "gradients_mb": sum(p.numel() * p.element_size() for p in loop.model.parameters()) / 2**20,
                "scaled_from": loop.config.batch if loop.scale > 1 else None,
                "start_s": found.start,
                "notes": found.notes,
            })  # fmt: skip
        return rows

    def measured(self, locks: str, cores: int) -> list[Row]:
        """The rows, from a process that compiles on so many cores; of starts from two."""
        variables = {"TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(cores))}
        if self.kind != "starts":
            return run_apart(self, "rows", variables, locks)
        with tempfile.TemporaryDirectory() as cache:
            variables["TORCHINDUCTOR_CACHE_DIR"] = cache
            (first,), (second,) = (run_apart(self, "rows", variables, locks) for _ in range(2))
        return [first | {"first_s": first["start_s"], "second_s": second["start_s"]}]


def one_chooses(lock: Path) -> None:
    """The compiler chooses among kernels by timing them: from now on only while no other process does."""
    if not torch.cuda.is_available():
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # here, since it brings sympy

    own = CachingAutotuner.benchmark_all_configs

    def alone(*args: Any, **kwargs: Any) -> Any:
        with lock.open("a") as choosing:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            return own(*args, **kwargs)

    CachingAutotuner.benchmark_all_configs = alone  # type: ignore[method-assign]


def peak_here(loop: Loop) -> float:
    """MB that steps of every kind take above what lies in memory between two steps. On a CPU this needs `EXACT`.

    Steps are made before, so that libraries are set up and everything is compiled. A captured step is captured once
    more: its CUDA graphs keep their memory to themselves, and that counts.
    """
    loop.first_rounds()
    loop.optimiser.zero_grad()
    device = loop.config.device
    meter = environment.PeakMemory(device)
    if not meter.cuda:
        loop.first_rounds()
        return meter.megabytes()
    taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    again = loop.replayed() if loop.captures else loop
    again.first_rounds()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device) - reserved
    return max(meter.megabytes() - taken / 2**20, held / 2**20)


def run_apart(case: Case, name: str, variables: Mapping[str, str], *arguments: Any) -> Any:
    """What the method `name` of a case returns in a process of its own."""
    asked = pickle.dumps((case, name, arguments, torch.get_num_threads()))
    command = [sys.executable, "-c", f"from {Case.__module__} import serve; serve()"]
    done = subprocess.run(command, input=asked, capture_output=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        said = done.stderr.decode().strip().splitlines() or ["no message"]
        raise GradguessError(f"measuring {case.name} failed: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def serve() -> None:
    """Print what `run_apart` asks for on standard input."""
    case, name, arguments, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    print(json.dumps(getattr(case, name)(*arguments)))


def in_turns(cases: Sequence[Case], together: int = 1) -> Iterator[tuple[Case, list[Row] | GradguessError]]:
    """The rows of each case, or why there are none, from processes that get ready side by side and are timed by turns.

    Compiling takes minutes and many cores, timing takes seconds and a quiet machine. So while one process is timed, the
    others wait.
    """
    cores = max(1, (os.cpu_count() or 1) // together)
    with tempfile.TemporaryDirectory() as locks, contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(together)
        stack.callback(pool.shutdown, cancel_futures=True)
        for case, rows in [(case, pool.submit(case.measured, locks, cores)) for case in cases]:
            try:
                yield case, rows.result()
            except GradguessError as error:
                yield case, error


# by kind: what a slope is called, the settings over which it is fitted, and the point of a row
FITS: dict[str, tuple[str, Sequence[str], Callable[[Row, str], tuple[float, float]]]] = {
    "time": ("exponent", AXES, lambda row, axis: (math.log(row[axis]), math.log(row["quiet_ms"]))),
    "memory": ("mb_per_layer", ["depth"], lambda row, axis: (row[axis], row["peak_mb"] - row["gradients_mb"])),
}


def growth(kind: str, rows: Sequence[Row]) -> list[Row]:
    """Of each method, where nothing but an axis differs: the exponent `a` in `time ~ axis^a`, from the quietest rounds.

    Or the megabytes that one more layer costs, without the gradients of its parameters.
    """
    found: list[Row] = []
    name, axes, point = FITS[kind]
    for axis in axes:
        lines: dict[str, dict[float, float]] = {}
        for row in rows:
            if all(row[other] == rows[0][other] for other in SETTINGS if other != axis):
                lines.setdefault(row["method"], {}).update([point(row, axis)])
        for method, line in lines.items():
            if len(line) > 1:
                slope = float(np.polyfit(list(line), list(line.values()), 1)[0])
                found.append({"method": method, "axis": axis, name: slope, "points": len(line)})
    return found


def make_record(kind: str, rows: Sequence[Row], device: str, load: float) -> Row:
    """The rows, with the environment; `load` is that of the machine before they were measured."""
    where = {**environment.describe(device), "load_before": load, "load_after": os.getloadavg()[0]}
    return {"schema": SCHEMA, "kind": kind, "environment": where, "rows": list(rows), "growth": []}


def _where(record: Row) -> Row:
    """Code and machine."""
    return {key: value for key, value in record.get("environment", {}).items() if not key.startswith("load")}


def keep(record: Row, out: Path | None, name: str) -> None:
    """Write the record to a directory, if there is one."""
    if out is not None:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{name}.json", record)


def kind_of(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none of PyTorch's.") from error
