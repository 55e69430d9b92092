"""The training loops that are timed, each on its own copy of one network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.cuda_graphs import Recording, on_side_stream
from gradguess.captured_step import WARM_UP
from gradguess_lab.config import TrainConfig
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.methods import options_of
from gradguess_lab.train import build_forward

Precision = Callable[[], AbstractContextManager[Any]]


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Loop:
    """A training loop that is run step by step: backpropagation as anyone would write it."""

    every = 1  # the number of steps after which the work repeats, apart from refreshes
    refresh = 0  # the number of such rounds between two refreshes of what is cached; 0 if nothing is cached
    forward: gg.ForwardGradient | None = None  # what estimates the gradients; None for backpropagation

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, compiled: bool = False, precision: Precision = nullcontext
    ) -> None:
        self.model, self.x, self.y, self.precision = model, x, y, precision
        self._mean_loss = torch.compile(mean_loss, fullgraph=True, dynamic=False) if compiled else mean_loss
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=x.is_cuda)

    @property
    def turn(self) -> Callable[[], Any]:
        """A step as it is timed."""
        return self.step

    def captured(self) -> Callable[[], Any]:
        """A step as a CUDA graph."""
        if self.forward is not None:
            step = gg.CapturedStep(self.forward, self.optimiser, per_sample_loss)
            return lambda: self.within(lambda: step(self.x, self.y))
        for _ in range(WARM_UP):
            on_side_stream(self.step)
        recording, batch = Recording(self.step), (self.x.clone(), self.y.clone())

        def replay() -> Tensor:
            for there, new in zip((self.x, self.y), batch, strict=True):  # a recording reads its batch from one place
                there.copy_(new)
            return recording.replay()

        return replay

    def step(self) -> Tensor:
        self.optimiser.zero_grad()
        loss = self.differentiate()
        self.optimiser.step()
        return loss

    def differentiate(self) -> Tensor:
        """Compute the gradients, and return the mean loss."""
        if self.forward is not None:
            forward = self.forward
            return self.within(lambda: forward(per_sample_loss, self.x, self.y))
        loss = self.mean_loss()
        loss.backward()
        return loss.detach()

    def mean_loss(self) -> Tensor:
        return self.within(lambda: self._mean_loss(self.model, self.x, self.y))

    def within(self, function: Callable[[], Tensor]) -> Tensor:
        """In the precision of the task."""
        with self.precision():
            return function()

    def rewind(self, to_refresh: bool) -> None:
        """Make the next step one that refreshes, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.state = dataclasses.replace(self.forward.state, count=0 if to_refresh else self.every)


class GuessedLoop(Loop):
    """A method of this library."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, x: Tensor, y: Tensor, precision: Precision = nullcontext
    ) -> None:
        super().__init__(model, x, y, precision=precision)
        self.forward = build_forward(config, model)
        self.every = config.every
        self.refresh = config.refresh if "refresh" in options_of(config.method) and config.refresh > 1 else 0


class Replayed:
    """A loop whose steps are replayed from CUDA graphs."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.every, self.refresh, self.rewind = loop, loop.every, loop.refresh, loop.rewind

    @cached_property
    def turn(self) -> Callable[[], Any]:
        return self.loop.captured()
