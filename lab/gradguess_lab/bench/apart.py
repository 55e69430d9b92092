"""What is measured in a process of its own: one task in all modes, the memory of a loop, the start of a compiled one.

`python -m gradguess_lab.bench.apart NAME JSON` calls the function NAME of `APART` and prints what it returns as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gradguess.errors import GradguessError
from gradguess_lab.bench.loops import BACKPROP, ROUND, Loop, Replayed, make_loop, measure
from gradguess_lab.config import TrainConfig
from gradguess_lab.environment import PeakMemory
from gradguess_lab.methods import settings_of

Row = dict[str, Any]
# glibc keeps freed blocks for itself, more of them the more often a loop allocates. With these settings they go back at
# once, so that the resident set is what the loop holds. That is slow, so times are taken in another process.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MODES = {  # how the operations of a step are started -> (compiled, captured)
    "eager": (False, False),
    "captured": (False, True),
    "compiled": (True, False),
    "compiled-captured": (True, True),
}


@dataclass(frozen=True)
class Timing:
    """What a process does: `seconds` of timing for each loop of a task, and where asked for the memory of each."""

    name: str
    task: TrainConfig
    methods: Sequence[str]
    compile: bool = False
    seconds: float = 0.0
    memory: bool = False
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that methods have on this task alone

    @property
    def cuda(self) -> bool:
        return torch.device(self.task.device).type == "cuda"

    @property
    def modes(self) -> list[str]:
        """All that there are, or the usual one: on a GPU steps are captured."""
        if not self.compile:
            return ["captured" if self.cuda else "eager"]
        return [mode for mode, (_, captures) in MODES.items() if self.cuda or not captures]

    def loops(self) -> dict[tuple[str, str], Loop]:
        """(method, mode) -> loop. A loop and its captured twin share the network and what is compiled."""
        loops: dict[tuple[str, str], Loop] = {}
        for method in dict.fromkeys((BACKPROP, *self.methods)):
            made: dict[bool, Loop] = {}
            for mode in self.modes:
                compiled, captured = MODES[mode]
                # of checkpoints the compiler chooses by itself what is recomputed
                if compiled and settings_of(method)["method"] == "checkpointed":
                    continue
                if compiled not in made:
                    made[compiled] = make_loop(method, self.task, compiled, self.own.get(method))
                loops[method, mode] = Replayed(made[compiled]) if captured else made[compiled]
        return loops

    def apart(self, name: str, variables: Mapping[str, str], **more: Any) -> Any:
        """What a function of `APART` returns for this."""
        return run_apart(self.name, name, dataclasses.asdict(self) | more, variables)

    def peaks(self) -> list[float]:
        """The peak memory of each loop, in this process."""
        return [peak_here(loop) for loop in self.loops().values()]

    def rows(self, ready: Callable[[], None] = lambda: None) -> list[Row]:
        """For each method in each mode time, its ratios to backpropagation in each of its modes, and memory."""
        if self.compile:
            torch.compiler.reset()
        loops = self.loops()
        times = measure(loops, self.seconds, ready)
        peaks: list[Any] = [None] * len(loops)
        if self.memory:
            peaks = [peak_here(loop) for loop in loops.values()] if self.cuda else self.apart("peaks", EXACT)
        return [
            {
                "method": method,
                "task": self.name,
                "mode": mode,
                "device": self.task.device,
                **found.row(times[BACKPROP, self.modes[0]]),
                "ratios": {other: found.ratio(times[BACKPROP, other]) for other in self.modes},
                "peak_mb": peak,
                "start_s": found.start,
                "notes": found.notes,
            }
            for ((method, mode), found), peak in zip(times.items(), peaks, strict=True)
        ]

    def in_turn(self, locks: str) -> list[Row]:
        """The rows, timed while no other process is timed or compiles; `locks` is a folder that the processes share."""
        with (Path(locks) / "machine").open("a") as machine, _one_chooses(Path(locks) / "choosing"):
            fcntl.flock(machine, fcntl.LOCK_SH)
            return self.rows(lambda: fcntl.flock(machine, fcntl.LOCK_EX))

    def start(self) -> float:
        """Seconds until every kind of step of the first method is compiled."""
        loop = make_loop(self.methods[0], self.task, compiled=True)
        begin = time.perf_counter()
        loop.first_rounds()
        return time.perf_counter() - begin


@contextlib.contextmanager
def _one_chooses(lock: Path) -> Iterator[None]:
    """The compiler chooses among kernels by timing them: here only while no other process does."""
    if not torch.cuda.is_available():
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # here, since it brings sympy

    own = CachingAutotuner.benchmark_all_configs

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock.open("a") as choosing:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            return own(self, *args, **kwargs)

    with patch.object(CachingAutotuner, "benchmark_all_configs", locked):
        yield


def peak_here(loop: Loop) -> float:
    """MB that steps of every kind take above what lies in memory between two steps. On a CPU this needs `EXACT`.

    Steps are made before, so that libraries are set up and everything is compiled. A captured step is captured once
    more: its CUDA graphs keep their memory to themselves, and that counts.
    """
    loop.first_rounds()
    loop.optimiser.zero_grad()
    device = loop.config.device
    meter = PeakMemory(device)
    if not meter.cuda:
        loop.first_rounds()
        return meter.megabytes()
    taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    again = Replayed(loop) if isinstance(loop, Replayed) else loop
    again.first_rounds()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device) - reserved
    return max(meter.megabytes() - taken / 2**20, held / 2**20)


def fewer(task: TrainConfig, samples: int) -> TrainConfig:
    """The same task with at most `samples` samples."""
    return dataclasses.replace(task, batch=min(task.batch, samples))


def peak(method: str, task: TrainConfig, timed: bool = True) -> dict[str, float]:
    """`peak_mb` above the loop's own state (weights and the optimiser's), `gradients_mb` of it, and `step_ms`.

    Unless `timed`, the time is that of the slow steps whose memory was measured.
    """
    asked = {"method": method, "task": task.as_dict()}
    found: dict[str, float] = run_apart(method, "probe", asked | {"steps": 1}, EXACT)
    return found | {"step_ms": run_apart(method, "probe", asked, {})["step_ms"]} if timed else found


def probe(method: str, task: TrainConfig, steps: int = ROUND) -> dict[str, float]:
    """What `peak` returns, measured in this process, which should be a fresh one."""
    loop, whole = make_loop(method, fewer(task, 2)), Loop(task, plain=True)
    loop.step()  # now libraries are set up, and the optimiser has its state
    loop.optimiser.zero_grad()
    loop.x, loop.y = whole.x, whole.y
    del whole
    meter = PeakMemory(task.device)
    seconds = [loop.seconds(1) for _ in range(max(steps, loop.every))]
    gradients = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    return {
        "peak_mb": meter.megabytes(),
        "gradients_mb": gradients / 2**20,  # part of the peak, and the same for every method
        "step_ms": 1e3 * statistics.mean(seconds),
    }


def run_apart(what: str, name: str, asked: Row, variables: Mapping[str, str]) -> Any:
    """What a function of `APART` returns in a process of its own; `what` is measured there."""
    text = json.dumps(asked | {"threads": torch.get_num_threads()})
    command = [sys.executable, "-m", __name__ if __spec__ is None else __spec__.name, name, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        raise GradguessError(f"measuring {what} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


APART: dict[str, Callable[..., Any]] = {
    "probe": probe,
    "peaks": lambda **fields: Timing(**fields).peaks(),
    "start": lambda **fields: Timing(**fields).start(),
    "rows": lambda locks, **fields: Timing(**fields).in_turn(locks),
}


def in_turns(timings: Sequence[Timing], together: int = 1) -> Iterator[tuple[str, list[Row] | GradguessError]]:
    """The rows of each task, or why there are none, from processes that get ready side by side and are timed by turns.

    Compiling takes minutes and many cores, timing takes seconds and a quiet machine. So while one process is timed, the
    others wait.
    """
    cores = str(max(1, (os.cpu_count() or 1) // together))
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", cores)}
    with tempfile.TemporaryDirectory() as locks, contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(together)
        stack.callback(pool.shutdown, cancel_futures=True)
        for one, rows in [(one, pool.submit(one.apart, "rows", variables, locks=locks)) for one in timings]:
            try:
                yield one.name, rows.result()
            except GradguessError as error:
                yield one.name, error


def main() -> None:
    asked = json.loads(sys.argv[2])
    torch.set_num_threads(asked.pop("threads"))
    print(json.dumps(APART[sys.argv[1]](**asked | {"task": TrainConfig.from_dict(asked["task"])})))


if __name__ == "__main__":
    main()
