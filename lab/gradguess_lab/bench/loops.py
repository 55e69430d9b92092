"""What is timed: training loops, each on its own copy of one network, on the first batch of its data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.cuda_graphs import Recording, on_side_stream
from gradguess.captured_step import WARM_UP
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.methods import options_of, settings_of
from gradguess_lab.train import autocast, build_forward, build_model

BACKPROP = "backprop"  # the loop that all others are compared with
PIECES: dict[str, Callable[[int], int]] = {  # of loops whose memory is compared, by the depth of the network
    "checkpoint-all": lambda depth: depth,
    "checkpoint-sqrt": lambda depth: math.ceil(depth / max(1, math.isqrt(depth))),
    "pieces-replay": math.isqrt,
}


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Loop:
    """A training loop that is run step by step.

    Attributes:
        every: the number of steps after which the work repeats, apart from refreshes.
        refresh: the number of such rounds between two refreshes of what is cached; 0 if nothing is cached.
        forward: what estimates the gradients; None for backpropagation as anyone would write it.
    """

    every, refresh = 1, 0
    forward: gg.ForwardGradient | None = None

    def __init__(self, config: TrainConfig) -> None:
        data = load(config.data).first(config.batch).to(config.device, getattr(torch, config.dtype))
        often = -(-config.batch // len(data.x_train))  # a batch may be larger than the data
        self.x, self.y = (t.repeat(often, *[1] * (t.dim() - 1))[: config.batch] for t in (data.x_train, data.y_train))
        self.config, self.model = config, build_model(config, data)
        compiles = config.compile and config.method == BACKPROP
        self._mean_loss = torch.compile(mean_loss, fullgraph=True, dynamic=False) if compiles else mean_loss
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=self.x.is_cuda)

    @property
    def turn(self) -> Callable[[], Any]:
        """A step as it is timed."""
        return self.step

    def captured(self) -> Callable[[], Any]:
        """A step as a CUDA graph."""
        if self.forward is not None:
            step = gg.CapturedStep(self.forward, self.optimiser, per_sample_loss)
            return lambda: self._within(lambda: step(self.x, self.y))
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


class GuessedLoop(Loop):
    """A method of this library."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.forward = build_forward(config, self.model)
        self.every = config.every
        self.refresh = config.refresh if "refresh" in options_of(config.method) and config.refresh > 1 else 0


class Replayed:
    """A loop whose steps are replayed from CUDA graphs."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.every, self.refresh, self.rewind = loop, loop.every, loop.refresh, loop.rewind

    @cached_property
    def turn(self) -> Callable[[], Any]:
        return self.loop.captured()


def make_loop(name: str, task: TrainConfig, compiled: bool = False, own: Mapping[str, Any] | None = None) -> Loop:
    """The loop that `name` stands for on a task; `own` are further settings of it."""
    if name == BACKPROP:
        return Loop(dataclasses.replace(task, method=BACKPROP, compile=compiled))
    settings = {**settings_of(name), **(own or {}), "compile": compiled}
    if name in PIECES:
        settings["sites"] = str(max(2, PIECES[name](task.depth)))
    return GuessedLoop(dataclasses.replace(task, **settings))


def fewer(task: TrainConfig, samples: int) -> TrainConfig:
    """The same task with at most `samples` samples."""
    return dataclasses.replace(task, batch=min(task.batch, samples))
