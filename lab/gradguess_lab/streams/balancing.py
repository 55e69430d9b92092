"""Influence balancing: near influences point one way and far ones the other, so that truncation learns the opposite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradguess_lab.streams.task import Moment, Task

UNITS, NEGATIVE = 23, 13


class Balance(nn.Module):
    """`s ← A s + θ (1, .., 1, -1, .., -1)` with A averaging each unit and the next; the first unit is the output.

    Reference: Tallec and Ollivier 2018.
    """

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))
        A = torch.diag(torch.full((UNITS,), 0.5)) + torch.diag(torch.full((UNITS - 1,), 0.5), 1)
        signs = torch.ones(UNITS)
        signs[UNITS - NEGATIVE :] = -1
        self.register_buffer("A", A)
        self.register_buffer("signs", signs)

    def initial_state(self, streams: int) -> Tensor:
        return self.theta.new_ones(streams, UNITS).detach()

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state @ self.A.T + self.theta * self.signs  # type: ignore[operator]
        return state[:, :1], state


def balancing(streams: int, delay: int, generator: torch.Generator) -> Task:
    """The output is to be one. The model is `Balance`; nothing comes in."""

    def moments() -> Iterator[Moment]:
        nothing, one = torch.zeros(streams, 1), torch.ones(streams, 1)
        while True:
            yield Moment(nothing, one)

    return Task(moments(), 1, 1, "squared", 1.0)
