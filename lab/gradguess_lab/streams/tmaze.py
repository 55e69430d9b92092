"""The T-maze: an agent sees at the start on which side the reward is, walks a corridor, and must remember.

The settings are those of sonaradarcn/sketched-rtrl (after Bakker 2001): actor and critic learn at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradguess.online import Later, Online
from gradguess_lab.streams.config import StreamConfig

SEES, ACTIONS = 4, 3
DISCOUNT, ENTROPY = 0.99, 0.01


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
    """The task of the corridors; `gradguess_lab.streams.tasks.Task` says what its members are."""

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
