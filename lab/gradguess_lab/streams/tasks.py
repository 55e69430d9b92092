"""Tasks on endless streams: endless generators, and how answers to them are judged.

Each takes the number of streams, the delay and a generator of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradguess.online import Later, Online
from gradguess_lab.data import load
from gradguess_lab.datasets import CHARACTERS
from gradguess_lab.streams.config import StreamConfig

Judged = Literal["squared", "classes", "bits"]
SYMBOLS, LENGTH = 8, 5  # of the copy task
WASHOUT, TRANSIENT = 200, 64  # steps of a chaotic system before it starts anew, and before the first that is seen
NOISE, DRIFT, PULL = 0.5, 0.01, 1e-4  # of the sensor
UNITS, NEGATIVE = 23, 13  # of influence balancing
SEES, ACTIONS, DISCOUNT, ENTROPY = 4, 3, 0.99, 0.01  # of the T-maze


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


# The T-maze: an agent sees at the start on which side the reward is, walks a corridor, and must remember. The settings
# are those of sonaradarcn/sketched-rtrl (after Bakker 2001): actor and critic learn at every step.


class Corridors:
    """Corridors of length `length`, one for each stream.

    Seen is one of: start with the goal left, start with the goal right, corridor, junction. Actions are forward, left
    and right. A right turn at the junction gives 4, a wrong one -0.4, any other step -0.1. An episode ends with a turn
    at the junction or after twice the length.
    """

    def __init__(self, streams: int, length: int, generator: torch.Generator) -> None:
        self.length, self.generator = length, generator
        self.place, self.time = (torch.zeros(streams, dtype=torch.long) for _ in range(2))
        self.goal = self._goals(streams)

    def _goals(self, count: int) -> Tensor:
        return torch.randint(2, (count,), generator=self.generator)

    def seen(self) -> Tensor:
        """(streams, 4), one-hot."""
        kind = torch.where(self.place >= self.length, 3, torch.where(self.place > 0, 2, self.goal))
        return torch.eye(SEES)[kind]

    def act(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reward, whether the episode ended, and whether it ended at the goal, of each stream."""
        junction, forward = self.place >= self.length, action == 0
        turned = junction & ~forward
        found = turned & (action - 1 == self.goal)
        reward = torch.where(found, 4.0, torch.where(turned, -0.4, -0.1))
        self.place = torch.where(~junction & forward, self.place + 1, self.place)
        self.time = self.time + 1
        ended = turned | (self.time >= 2 * self.length)
        self.goal = torch.where(ended, self._goals(len(self.goal)), self.goal)
        self.place, self.time = (torch.where(ended, 0, value) for value in (self.place, self.time))
        return reward, ended, found


class TMaze:
    """The task of the corridors; `Task` says what its members are."""

    inputs, outputs, chance = SEES, ACTIONS + 1, 0.5  # out come logits and the value

    def steps(
        self, config: StreamConfig, generator: torch.Generator, online: Online, optimiser: torch.optim.Optimizer
    ) -> Iterator[list[float]]:
        """Act, and learn from the reward of each step when the value of the next state is known.

        Each step yields one number for every episode that ended: 0 at the goal, 1 elsewhere.
        """
        maze, device = Corridors(config.streams, config.delay, generator), config.device
        waiting: tuple[Later, Tensor, Tensor, Tensor] | None = None
        while True:
            online(None, maze.seen().to(device))
            output = online.output.cpu()
            if waiting is not None:
                held, action, reward, ended = waiting
                worth = reward + DISCOUNT * torch.where(ended, 0.0, output[:, -1])
                optimiser.zero_grad()
                held(actor_critic, (action.to(device), worth.to(device)))
                optimiser.step()
            chances = output[:, :ACTIONS].softmax(1)
            action = torch.multinomial(chances, 1, generator=generator)[:, 0]
            held = online.later()
            reward, ended, found = maze.act(action)
            waiting = held, action, reward, ended
            if bool(ended.any()):
                online.reset(ended.to(device))
            yield [0.0 if hit else 1.0 for hit in found[ended].tolist()]


def actor_critic(output: Tensor, target: Any) -> Tensor:
    """The loss of each stream, given what it did and what that was worth."""
    action, worth = target
    log, value = output[:, :ACTIONS].log_softmax(1), output[:, -1]
    surprise = worth - value
    chosen = log.gather(1, action[:, None])[:, 0]
    entropy = -(log.exp() * log).sum(1)
    return -surprise.detach() * chosen + 0.5 * surprise**2 - ENTROPY * entropy


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
