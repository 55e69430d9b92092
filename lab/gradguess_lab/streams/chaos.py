"""Chaotic systems of which one coordinate is seen: its next value is asked for. The error is the normalised one.

The settings are those of sonaradarcn/sketched-rtrl: streams start anew every 200 steps; values have mean zero and
variance one (here by constants of the attractors, since a stream has no end).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradguess_lab.streams.task import Moment, Task

WASHOUT = 200
TRANSIENT = 64
HENON = (0.2573, 0.7209)  # mean and standard deviation of x on the attractor
LORENZ = (0.0, 8.24)


def henon(streams: int, delay: int, generator: torch.Generator) -> Task:
    """The Hénon map, a = 1.4, b = 0.3; x is seen."""
    start = torch.rand(streams, 2, generator=generator, dtype=torch.double) * 0.1
    return _task(start, _henon, *HENON, streams)


def lorenz(streams: int, delay: int, generator: torch.Generator) -> Task:
    """The Lorenz system, two Euler steps of 0.01 at a time; x is seen."""
    start = 1 + 0.1 * torch.randn(streams, 3, generator=generator, dtype=torch.double)
    return _task(start, _lorenz, *LORENZ, streams)


def _henon(s: Tensor) -> Tensor:
    x, y = s.unbind(1)
    return torch.stack([1 - 1.4 * x * x + y, 0.3 * x], 1)


def _lorenz(s: Tensor) -> Tensor:
    for _ in range(2):
        x, y, z = s.unbind(1)
        s = s + 0.01 * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], 1)
    return s


def _task(s: Tensor, step: Callable[[Tensor], Tensor], mean: float, deviation: float, streams: int) -> Task:
    def moments() -> Iterator[Moment]:
        state, count, every = s, 0, torch.ones(streams, dtype=torch.bool)
        for _ in range(TRANSIENT):
            state = step(state)
        while True:
            after = step(state)
            x, target = (((value[:, :1] - mean) / deviation).float() for value in (state, after))
            yield Moment(x, target, every if count % WASHOUT == 0 else None)
            state, count = after, count + 1

    return Task(moments(), 1, 1, "squared", 1.0)
