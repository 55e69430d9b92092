"""Training loops, each on its own copy of one network and on the first batch of its data, and their times.

Loops take turns in one process, a round of steps each, so that all see the same machine. A ratio is the median over the
rounds of a loop's time over that of backpropagation in the same round: a busy machine slows down both sides of it.

A step's time includes refreshes: rounds with a refresh are timed as well, and what they take more is spread over the
steps between two refreshes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.cuda_graphs import Recording, on_side_stream
from gradguess.captured_step import WARM_UP
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.methods import entry_of, options_of
from gradguess_lab.train import autocast, build_forward, build_model

BACKPROP = "backprop"  # the loop that all others are compared with
PIECES: dict[str, Callable[[int], int]] = {  # of loops whose memory is compared, by the depth of the network
    "checkpoint-all": lambda depth: depth,
    "checkpoint-sqrt": lambda depth: math.ceil(depth / max(1, math.isqrt(depth))),
    "pieces-replay": math.isqrt,
}
ROUND = 4  # steps; a multiple of every method's own period
LONG_ROUND = 40  # steps in a round of short steps on a GPU, which must not wait for the clock
SHORT_STEP = 5e-3  # seconds; a shorter step counts as short
LEAST_ROUNDS = 5
WARM_ROUNDS = 2  # before the clock runs: a step is compiled when it is seen for the second time
CAPTURED_ROUNDS = 4  # and captured when it is seen for the fourth time
REFRESHES = 3  # rounds with a refresh, for each method that refreshes something
Name = TypeVar("Name")


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return per_sample_loss(model(x), y).mean()


class Loop:
    """A training loop that is run step by step.

    Attributes:
        every: the number of steps after which the work repeats, apart from refreshes.
        refresh: the number of such rounds between two refreshes of what is cached; 0 if nothing is cached.
        forward: what estimates the gradients; None for backpropagation as anyone would write it.
        turn: makes a step as it is timed.
        captures: whether steps are replayed from CUDA graphs.
        scale: by which times are multiplied, of a loop with a part of the batch.
    """

    def __init__(self, config: TrainConfig, plain: bool = False, scale: float = 1.0) -> None:
        data = load(config.data).first(config.batch).to(config.device, getattr(torch, config.dtype))
        often = -(-config.batch // len(data.x_train))  # a batch may be larger than the data
        self.x, self.y = (t.repeat(often, *[1] * (t.dim() - 1))[: config.batch] for t in (data.x_train, data.y_train))
        self.config, self.model, self.scale = config, build_model(config, data), scale
        self.forward = None if plain else build_forward(config, self.model)
        compiles = config.compile and plain
        self._mean_loss = torch.compile(mean_loss, fullgraph=True, dynamic=False) if compiles else mean_loss
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=self.x.is_cuda)
        self.every = config.every
        self.refresh = config.refresh if "refresh" in options_of(config.method) and config.refresh > 1 else 0
        self.captures = False
        self.turn: Callable[[], Any] = self.step

    def replayed(self) -> Loop:
        """The same loop, with steps that are replayed from CUDA graphs; it shares the network and what is compiled."""
        twin = copy.copy(self)
        twin.captures, twin.turn = True, twin._captured
        return twin

    def _captured(self) -> Tensor:
        """A step, after which all are replayed from a CUDA graph."""
        if self.forward is not None:
            step = gg.CapturedStep(self.forward, self.optimiser, per_sample_loss)
            self.turn = lambda: self._within(lambda: step(self.x, self.y))
            return self.turn()
        for _ in range(WARM_UP):
            on_side_stream(self.step)
        recording, batch = Recording(self.step), (self.x.clone(), self.y.clone())

        def replay() -> Tensor:
            for there, new in zip((self.x, self.y), batch, strict=True):  # a recording reads its batch from one place
                there.copy_(new)
            return recording.replay()

        self.turn = replay
        return replay()

    def step(self) -> Tensor:
        self.optimiser.zero_grad()
        if (forward := self.forward) is not None:
            loss = self._within(lambda: forward(per_sample_loss, self.x, self.y))
        else:
            loss = self._within(lambda: self._mean_loss(self.model, self.x, self.y))
            loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _within(self, function: Callable[[], Tensor]) -> Tensor:
        """In the precision of the task."""
        with autocast(self.config):
            return function()

    def rewind(self, to_refresh: bool) -> None:
        """Make the next step one that refreshes, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.state = dataclasses.replace(self.forward.state, count=0 if to_refresh else self.every)

    def seconds(self, length: int = ROUND) -> float:
        """The time of one of so many steps that are made now."""
        start = time.perf_counter()
        for _ in range(length):
            self.turn()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return self.scale * (time.perf_counter() - start) / length

    def round(self, refreshing: bool, length: int = ROUND) -> float:
        """Seconds per step of a round, with a refresh or without."""
        self.rewind(refreshing)
        return self.seconds(length)

    def first_rounds(self) -> float:
        """Rounds with and without a refresh until nothing is new in them. The seconds of a step in the last one."""
        for _ in range(CAPTURED_ROUNDS if self.captures else WARM_ROUNDS):
            self.round(True)
            took = self.round(False)
        return took


def make_loop(
    name: str, task: TrainConfig, compiled: bool = False, own: Mapping[str, Any] | None = None, samples: int = 0
) -> Loop:
    """The loop that `name` stands for on a task; `own` are further settings of it.

    With `samples`, it has at most so many in a batch, and its times are scaled to the task's batch.
    """
    settings = {**entry_of(name).settings, **(own or {}), "compile": compiled}
    if name in PIECES:
        settings["sites"] = str(max(2, PIECES[name](task.depth)))
    batch = min(task.batch, samples or task.batch)
    return Loop(dataclasses.replace(task, **settings, batch=batch), name == BACKPROP, task.batch / batch)


@dataclass
class Times:
    """Seconds per step, one entry per round."""

    plain: list[float] = field(default_factory=list)
    refreshing: list[float] = field(default_factory=list)
    between: int = 0  # steps between two refreshes
    length: int = ROUND  # steps in a round
    start: float = 0.0  # seconds of the first steps, until each kind of step is compiled and captured
    notes: list[str] = field(default_factory=list)  # why steps are not compiled, if they should be

    @property
    def refresh(self) -> float:
        """Seconds that one refresh adds."""
        if not self.refreshing:
            return 0.0
        return max(0.0, self.length * (statistics.median(self.refreshing) - statistics.median(self.plain)))

    @property
    def share(self) -> float:
        """Seconds per step that refreshes add."""
        return self.refresh / self.between if self.between else 0.0

    @property
    def step(self) -> float:
        return statistics.median(self.plain) + self.share

    @property
    def quiet(self) -> float:
        """The time of a step when the machine had nothing else to do: the fastest decile."""
        return sorted(self.plain)[len(self.plain) // 10] + self.share

    def ratio(self, other: Times) -> float:
        """The median of paired ratios, refreshes included."""
        paired = [mine / theirs for mine, theirs in zip(self.plain, other.plain, strict=False)]
        return statistics.median(paired) + self.share / statistics.median(other.plain)

    def row(self, base: Times) -> dict[str, Any]:
        """What a record says of these times; `base` are those of backpropagation."""
        return {
            "step_ms": 1e3 * self.step,
            "quiet_ms": 1e3 * self.quiet,
            "refresh_ms": 1e3 * self.refresh,
            "ratio": self.ratio(base),
            "quiet_ratio": self.quiet / base.quiet,
            "rounds": len(self.plain),
        }


def measure(loops: Mapping[Name, Loop], seconds: float, ready: Callable[[], None] = lambda: None) -> dict[Name, Times]:
    """Run all loops in turns for about `seconds` each. When all of them have started, `ready` is called."""
    times = {name: _started(loop) for name, loop in loops.items()}
    ready()
    rounds, end = 0, time.perf_counter() + seconds * len(loops)
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for name, loop in loops.items():
            times[name].plain.append(loop.round(False, times[name].length))
        for name, loop in loops.items():
            if rounds < REFRESHES and loop.refresh:
                times[name].refreshing.append(loop.round(True, times[name].length))
        rounds += 1
    return times


def _started(loop: Loop) -> Times:
    """Make the first steps, which compile and capture, and see how long a step takes."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", "compile=True")
        took = loop.first_rounds()
    notes = {str(warning.message) for warning in said if str(warning.message).startswith("compile=True")}
    length = LONG_ROUND if loop.x.is_cuda and took < SHORT_STEP else ROUND
    return Times(between=loop.refresh * loop.every, length=length, start=time.perf_counter() - begin, notes=list(notes))
