"""Step times of real networks: the variants of the study against a plain loop with `loss.backward()`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gradguess.experiments.bench.rivals import RIVAL, Rival
from gradguess.experiments.bench.timing import Times, measure
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.data import Dataset, load
from gradguess.experiments.loss import per_sample_loss
from gradguess.experiments.names import lookup
from gradguess.experiments.real import TASKS, VARIANTS
from gradguess.experiments.train import build_forward, build_model


class Plain(Rival):
    """Backpropagation on one batch of a task."""

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        self.take(build_model(config, data), data.x_train[: config.batch], data.y_train[: config.batch])

    def mean_loss(self) -> Tensor:
        return per_sample_loss(self.model(self.x), self.y).mean()


class Estimated(Plain):
    """A variant of the study."""

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        super().__init__(config, data)
        self.forward = build_forward(config, self.model)
        self.every = config.every
        self.refresh = config.refresh  # of W⊥'s basis; feedback counts its lessons


def time_task(name: str, seconds: float, device: str) -> dict[str, Times]:
    """Times of every variant on a task, and of the plain loop."""
    task = dataclasses.replace(lookup(TASKS, name, "task"), device=device)
    data = load(task.data).first(task.batch).to(device, getattr(torch, task.dtype))
    rivals: dict[str, Rival] = {RIVAL: Plain(task, data)}
    for variant, settings in VARIANTS.items():
        untaught = settings.get("learn") == "never" and not settings.get("bootstrap")  # a control, not a way to train
        if variant != RIVAL and not untaught:
            rivals[variant] = Estimated(dataclasses.replace(task, **settings), data)
    return measure(rivals, seconds, device)
