"""Tasks on endless streams: endless generators, and how answers to them are judged.

Each takes the number of streams, the delay and a generator of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradguess.online import Online
from gradguess_lab.data import load
from gradguess_lab.datasets import CHARACTERS
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.streams.tmaze import TMaze

Judged = Literal["squared", "classes", "bits"]
SYMBOLS, LENGTH = 8, 5  # of the copy task
WASHOUT, TRANSIENT = 200, 64  # steps of a chaotic system before it starts anew, and before the first that is seen
NOISE, DRIFT, PULL = 0.5, 0.01, 1e-4  # of the sensor
UNITS, NEGATIVE = 23, 13  # of influence balancing


class Moment(NamedTuple):
    """What one step of all streams brings."""

    x: Tensor  # (streams, inputs)
    target: Tensor | None  # None: nothing is asked for
    ended: Tensor | None = None  # (streams,) of bool: streams whose episode starts anew with this step


Moments = Callable[[int, int, torch.Generator], Iterator[Moment]]


@dataclass(frozen=True)
class Task:
    """A generator that never ends, and the sizes that a model needs.

    Attributes:
        moments: makes the endless generator.
        inputs, outputs: numbers that go in and come out at each step.
        judged: "squared" error; "classes": the part of wrong answers; "bits" per answer.
        chance: the error of a model that knows nothing of the past.
    """

    moments: Moments
    inputs: int = 1
    outputs: int = 1
    judged: Judged = "squared"
    chance: float = 1.0

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """What is minimised, one number per stream."""
        if self.judged == "squared":
            return ((output - target) ** 2).mean(1)
        return cross_entropy(output, target, reduction="none")

    def error(self, output: Tensor, target: Tensor) -> float:
        """What is reported."""
        if self.judged == "classes":
            return float((output.argmax(1) != target).float().mean())
        scale = 1 / torch.log(torch.tensor(2.0)) if self.judged == "bits" else 1.0
        return float(self.losses(output, target).mean() * scale)

    def steps(
        self, config: StreamConfig, generator: torch.Generator, online: Online, optimiser: torch.optim.Optimizer
    ) -> Iterator[list[float]]:
        """Make one step after the other; each yields the errors that were made in it."""
        for count, moment in enumerate(self.moments(config.streams, config.delay, generator)):
            if moment.ended is not None and count:
                online.reset(moment.ended.to(config.device))
            target = None if moment.target is None else moment.target.to(config.device)
            optimiser.zero_grad()
            online(self.losses, moment.x.to(config.device), target)
            if target is not None and (not config.stop or count < config.stop):
                optimiser.step()
            yield [] if target is None else [self.error(online.output, target)]


def recall(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """Random signs come in; the one of `delay` steps ago is asked for, at every step."""
    past = torch.zeros(streams, delay + 1)
    while True:
        signs = torch.randint(2, (streams, 1), generator=generator) * 2.0 - 1
        past = torch.cat([past[:, 1:], signs], 1)
        yield Moment(signs, past[:, :1])


def copy(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """Five symbols out of eight come in, then blanks, then cues: at each cue the next symbol is asked for.

    The settings are those of sonaradarcn/sketched-rtrl: the streams start anew with every episode.
    """
    every, one_hot = torch.ones(streams, dtype=torch.bool), torch.eye(SYMBOLS + 2)
    blank, cue = (one_hot[SYMBOLS + i].expand(streams, -1) for i in range(2))
    while True:
        symbols = torch.randint(SYMBOLS, (streams, LENGTH), generator=generator)
        for t in range(LENGTH):
            yield Moment(one_hot[symbols[:, t]], None, every if t == 0 else None)
        for _ in range(delay):
            yield Moment(blank, None)
        for t in range(LENGTH):
            yield Moment(cue, symbols[:, t])


# Chaotic systems of which one coordinate is seen: its next value is asked for. The error is the normalised one. The
# settings are those of sonaradarcn/sketched-rtrl; values have mean zero and variance one (here by constants of the
# attractors, since a stream has no end).


def henon(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """The Hénon map, a = 1.4, b = 0.3; x is seen."""

    def after(s: Tensor) -> Tensor:
        x, y = s.unbind(1)
        return torch.stack([1 - 1.4 * x * x + y, 0.3 * x], 1)

    start = torch.rand(streams, 2, generator=generator, dtype=torch.double) * 0.1
    return _first_coordinate(start, after, 0.2573, 0.7209)


def lorenz(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """The Lorenz system, two Euler steps of 0.01 at a time; x is seen."""

    def after(s: Tensor) -> Tensor:
        for _ in range(2):
            x, y, z = s.unbind(1)
            s = s + 0.01 * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], 1)
        return s

    start = 1 + 0.1 * torch.randn(streams, 3, generator=generator, dtype=torch.double)
    return _first_coordinate(start, after, 0.0, 8.24)


def _first_coordinate(
    state: Tensor, after: Callable[[Tensor], Tensor], mean: float, deviation: float
) -> Iterator[Moment]:
    count, every = 0, torch.ones(len(state), dtype=torch.bool)
    for _ in range(TRANSIENT):
        state = after(state)
    while True:
        now, state = state, after(state)
        x, target = (((value[:, :1] - mean) / deviation).float() for value in (now, state))
        yield Moment(x, target, every if count % WASHOUT == 0 else None)
        count += 1


def balancing(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """The output is to be one. The model is `Balance`; nothing comes in."""
    while True:
        yield Moment(torch.zeros(streams, 1), torch.ones(streams, 1))


class Balance(nn.Module):
    """`s ← A s + θ (1, .., 1, -1, .., -1)` with A averaging each unit and the next; the first unit is the output.

    Near influences point one way and far ones the other, so that truncation learns the opposite.

    Reference: Tallec and Ollivier 2018.
    """

    A: Tensor
    signs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))
        self.register_buffer("A", 0.5 * (torch.eye(UNITS) + torch.diag(torch.ones(UNITS - 1), 1)))
        self.register_buffer("signs", torch.where(torch.arange(UNITS) < UNITS - NEGATIVE, 1.0, -1.0))

    def initial_state(self, streams: int) -> Tensor:
        return self.theta.new_ones(streams, UNITS).detach()

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state @ self.A.T + self.theta * self.signs
        return state[:, :1], state


def characters(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """The characters of Shakespeare one by one: the next one is asked for.

    Each stream starts at another place of the text; after its end it goes on at the beginning.
    """
    text, one_hot = load("shakespeare").x_train.flatten(), torch.eye(len(CHARACTERS))
    at = torch.randint(len(text), (), generator=generator) + torch.arange(streams) * (len(text) // streams)
    while True:
        yield Moment(one_hot[text[at % len(text)]], text[(at + 1) % len(text)])
        at = at + 1


def sensor(streams: int, delay: int, generator: torch.Generator) -> Iterator[Moment]:
    """A slow wave is read by a sensor with noise, a gain and an offset; the wave itself is asked for.

    Gain and offset wander, in all streams alike, and return to where they started only in the long run: what was
    learned once is wrong later, so that learning must go on.
    """
    phase = torch.rand(streams, 1, generator=generator) * 2 * math.pi
    speed = 0.1 + 0.2 * torch.rand(streams, 1, generator=generator)
    wander = torch.zeros(2)  # log of the gain, offset
    while True:
        wander = wander * (1 - PULL) + DRIFT * torch.randn(2, generator=generator)
        phase = (phase + speed) % (2 * math.pi)
        wave = torch.sin(phase)
        noise = NOISE * torch.randn(streams, 1, generator=generator)
        yield Moment(torch.exp(wander[0]) * wave + wander[1] + noise, wave)


TASKS: dict[str, Task | TMaze] = {
    "recall": Task(recall),
    "copy": Task(copy, SYMBOLS + 2, SYMBOLS, "classes", 1 - 1 / SYMBOLS),
    "henon": Task(henon),
    "lorenz": Task(lorenz),
    "balancing": Task(balancing),
    "characters": Task(characters, len(CHARACTERS), len(CHARACTERS), "bits", 4.75),
    "sensor": Task(sensor, chance=0.5),
    "tmaze": TMaze(),
}
