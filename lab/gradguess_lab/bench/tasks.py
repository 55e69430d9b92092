"""One real network in a process of its own: its loops get ready, wait for their turn, are timed and measured.

`python -m gradguess_lab.bench.tasks time JOB` says "ready", waits for a line, and prints its rows as JSON.
With `peaks` in place of `time` it prints the memory of each loop, with `start` the seconds until the first of its
methods is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguess_lab.bench.cases import RealCase
from gradguess_lab.bench.choosing import one_at_a_time
from gradguess_lab.bench.loops import Loop, Replayed
from gradguess_lab.bench.memory import EXACT, peak_here, run_apart
from gradguess_lab.bench.registry import BACKPROP, make_loop
from gradguess_lab.bench.timing import first_rounds, measure
from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import settings_of
from gradguess_lab.real import STUDIED

Row = dict[str, Any]
COMPARED = ("checkpoint-all", "mezo", "wt", "wperp", "feedback-chained-rare")  # with compiled steps, beside backprop
UNTAUGHT = ("feedback-chained-pieces-zero",)  # a control, not a way to train
MODES = {  # how the operations of a step are started -> (compiled, captured)
    "eager": (False, False),
    "captured": (False, True),
    "compiled": (True, False),
    "compiled-captured": (True, True),
}


def default_methods(compile: bool) -> tuple[str, ...]:
    """What is timed beside backpropagation if no method is named."""
    return COMPARED if compile else tuple(name for name in STUDIED if name not in (BACKPROP, *UNTAUGHT))


def modes(compile: bool, captured: bool) -> list[str]:
    """All that there are, or the usual one: on a GPU steps are captured.

    >>> modes(compile=True, captured=False), modes(compile=False, captured=True)
    (['eager', 'compiled'], ['captured'])
    """
    if not compile:
        return ["captured" if captured else "eager"]
    return [mode for mode, (_, captures) in MODES.items() if captured or not captures]


def make_loops(
    case: RealCase,
    methods: Sequence[str],
    wanted: Sequence[str],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[tuple[str, str], Loop | Replayed]:
    """(method, mode) -> loop. A loop and its captured twin share the network and what is compiled.

    `own` are settings that methods have on this task alone.
    """
    loops: dict[tuple[str, str], Loop | Replayed] = {}
    for method in (BACKPROP, *(name for name in methods if name != BACKPROP)):
        made: dict[bool, Loop] = {}
        recomputes = settings_of(method)["method"] == "checkpointed"
        for mode in wanted:
            compiled, captured = MODES[mode]
            if compiled and recomputes:  # the compiler chooses by itself what is recomputed
                continue
            if compiled not in made:
                made[compiled] = make_loop(method, case, compiled, (own or {}).get(method))
            loops[method, mode] = Replayed(made[compiled]) if captured else made[compiled]
    return loops


@dataclass(frozen=True)
class Job:
    """What a process does: `seconds` of timing for each loop of a task, and where asked for the memory of each."""

    name: str
    task: TrainConfig
    methods: Sequence[str]
    compile: bool
    seconds: float
    memory: bool = False
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that methods have on this task alone

    @property
    def cuda(self) -> bool:
        return torch.device(self.task.device).type == "cuda"

    @property
    def modes(self) -> list[str]:
        return modes(self.compile, captured=self.cuda)

    def loops(self) -> dict[tuple[str, str], Loop | Replayed]:
        return make_loops(RealCase(self.task), self.methods, self.modes, self.own)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"threads": torch.get_num_threads()})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job, in a process that has as many threads as the one that describes it."""
        fields = json.loads(text)
        torch.set_num_threads(fields.pop("threads"))
        return cls(**fields | {"task": TrainConfig.from_dict(fields["task"])})


def time_task(job: Job, ready: Callable[[], None] = lambda: None) -> list[Row]:
    """A row for each method in each mode: time, its ratios to backpropagation in each of its modes, memory."""
    if job.compile:
        torch.compiler.reset()
    loops = job.loops()
    times = measure(loops, job.seconds, job.task.device, ready)
    peaks: list[float] | list[None] = [None] * len(loops)
    if job.memory:
        command = [__spec__.name, "peaks", job.as_json()]
        peaks = peaks_here(job, loops) if job.cuda else run_apart(job.name, command, EXACT)
    return [
        {
            "method": method,
            "task": job.name,
            "mode": mode,
            "device": job.task.device,
            **found.row(times[BACKPROP, job.modes[0]]),
            "ratios": {other: found.ratio(times[BACKPROP, other]) for other in job.modes},
            "peak_mb": peak,
            "start_s": found.start,
            "notes": found.notes,
        }
        for ((method, mode), found), peak in zip(times.items(), peaks, strict=True)
    ]


def peaks_here(job: Job, loops: Mapping[tuple[str, str], Loop | Replayed]) -> list[float]:
    return [peak_here(loop, job.task.device) for loop in loops.values()]


def start(job: Job) -> float:
    """Seconds until every kind of step of the first method is compiled."""
    loop = make_loop(job.methods[0], RealCase(job.task), compiled=True)
    begin = time.perf_counter()
    first_rounds(loop, job.task.device)
    return time.perf_counter() - begin


def _wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    job = Job.from_json(sys.argv[2])
    make: dict[str, Callable[[], Any]] = {
        "time": lambda: time_task(job, _wait),
        "peaks": lambda: peaks_here(job, job.loops()),
        "start": lambda: start(job),
    }
    with one_at_a_time():
        print(json.dumps(make[sys.argv[1]]()))


if __name__ == "__main__":
    main()
