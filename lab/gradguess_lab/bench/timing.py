"""Times of several training loops, interleaved in one process so that all see the same machine.

Loops take turns, a round of steps each. A ratio is the median over the rounds of a loop's time over that of
backpropagation in the same round, so that a busy machine slows down both sides of it.

A step's time includes refreshes: rounds with a refresh are timed as well, and what they take more is spread over the
steps between two refreshes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gradguess_lab.bench.loops import Loop, Replayed

ROUND = 4  # steps; a multiple of every method's own period
LONG_ROUND = 40  # steps in a round of short steps on a GPU, which must not wait for the clock
SHORT_STEP = 5e-3  # seconds; a shorter step counts as short
LEAST_ROUNDS = 5
WARM_ROUNDS = 2  # before the clock runs: a step is compiled when it is seen for the second time
CAPTURED_ROUNDS = 4  # and captured when it is seen for the fourth time
REFRESHES = 3  # rounds with a refresh, for each method that refreshes something
Name = TypeVar("Name")


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


def measure(
    loops: Mapping[Name, Loop | Replayed], seconds: float, device: str, ready: Callable[[], None] = lambda: None
) -> dict[Name, Times]:
    """Run all loops in turns for about `seconds` each. When all of them have started, `ready` is called."""
    wait = _waiter(device)
    times = {name: _started(loop, device) for name, loop in loops.items()}
    ready()
    rounds, end = 0, time.perf_counter() + seconds * len(loops)
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for name, loop in loops.items():
            times[name].plain.append(_round(loop, False, wait, times[name].length))
        if rounds < REFRESHES:
            for name, loop in loops.items():
                if loop.refresh:
                    times[name].refreshing.append(_round(loop, True, wait, times[name].length))
        rounds += 1
    return times


def _started(loop: Loop | Replayed, device: str) -> Times:
    """Make the first steps, which compile and capture, and see how long a step takes."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", "compile=True")
        took = first_rounds(loop, device)
    notes = [str(warning.message) for warning in said if str(warning.message).startswith("compile=True")]
    length = LONG_ROUND if _on_gpu(device) and took < SHORT_STEP else ROUND
    return Times(
        between=loop.refresh * loop.every, length=length, start=time.perf_counter() - begin, notes=list(set(notes))
    )


def first_rounds(loop: Loop | Replayed, device: str) -> float:
    """Rounds with and without a refresh until nothing is new in them. The seconds of a step in the last one."""
    wait = _waiter(device)
    for _ in range(CAPTURED_ROUNDS if isinstance(loop, Replayed) else WARM_ROUNDS):
        _round(loop, True, wait)
        took = _round(loop, False, wait)
    return took


def measure_once(loop: Loop, device: str) -> float:
    """Seconds of the second step of a loop too slow for rounds."""
    wait = _waiter(device)
    loop.step()
    wait()
    start = time.perf_counter()
    loop.step()
    wait()
    return time.perf_counter() - start


def _round(loop: Loop | Replayed, refreshing: bool, wait: Callable[[], None], length: int = ROUND) -> float:
    loop.rewind(refreshing)
    start = time.perf_counter()
    for _ in range(length):
        loop.turn()
    wait()
    return (time.perf_counter() - start) / length


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _waiter(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if _on_gpu(device) else lambda: None
