"""A noisy sensor that drifts: what was learned once is wrong later, so that learning must go on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradguess_lab.streams.task import Moment, Task

NOISE, DRIFT, PULL = 0.5, 0.01, 1e-4


def sensor(streams: int, delay: int, generator: torch.Generator) -> Task:
    """A slow wave is read by a sensor with noise, a gain and an offset; the wave itself is asked for.

    Gain and offset wander, in all streams alike, and return to where they started only in the long run.
    """

    def moments() -> Iterator[Moment]:
        phase = torch.rand(streams, 1, generator=generator) * 2 * math.pi
        speed = 0.1 + 0.2 * torch.rand(streams, 1, generator=generator)
        wander = torch.zeros(2)  # log of the gain, offset
        while True:
            wander = wander * (1 - PULL) + DRIFT * torch.randn(2, generator=generator)
            phase = (phase + speed) % (2 * math.pi)
            wave = torch.sin(phase)
            noise = NOISE * torch.randn(streams, 1, generator=generator)
            yield Moment(torch.exp(wander[0]) * wave + wander[1] + noise, wave)

    return Task(moments(), 1, 1, "squared", 0.5)
