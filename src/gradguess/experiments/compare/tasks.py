"""The tasks of the comparison. To add one, add a line to `TASKS`; it appears when its data and model are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradguess.experiments.config import TrainConfig
from gradguess.experiments.datasets import DATASETS
from gradguess.experiments.models import MODELS

GRID = (3e-4, 1e-3, 3e-3)  # learning rates of AdamW
SHORT = 4  # a run that chooses a learning rate has this part of the epochs
_COMMON: dict[str, Any] = {"schedule": "cosine", "rate": 0.1, "eval_every": 1}


@dataclass(frozen=True)
class Task:
    """A network on data.

    Attributes:
        title: in tables and figures.
        settings: fields of `TrainConfig`.
        pieces: into how many the network is cut, for methods that work in pieces.
        grid: learning rates that every method is tried with.
    """

    title: str
    settings: Mapping[str, Any]
    pieces: int
    grid: tuple[float, ...] = GRID

    @property
    def known(self) -> bool:
        """Are its data, its model and its options there?"""
        fields = {item.name for item in dataclasses.fields(TrainConfig)}
        return self.settings["data"] in DATASETS and self.settings["model"] in MODELS and self.settings.keys() <= fields

    def config(self) -> TrainConfig:
        return TrainConfig(**{**_COMMON, **self.settings})


def _task(title: str, pieces: int, grid: tuple[float, ...] = GRID, **settings: Any) -> Task:
    return Task(title, settings, pieces, grid)


_CIFAR10: dict[str, Any] = {
    "data": "cifar10",
    "batch": 512,
    "warmup": 0.2,
    "smoothing": 0.1,
    "matmul": "high",
    "augment": True,
    "autocast": True,
}


_ALL: dict[str, Task] = {
    "mlp-mnist1d": _task(
        "MLP on MNIST-1D",
        pieces=4, data="mnist1d", model="mlp", width=256, depth=3, bias=True, epochs=100, batch=128,
    ),
    "cnn-fashion-mnist": _task(
        "CNN on Fashion-MNIST",
        pieces=4, data="fashion-mnist", model="cnn", width=32, depth=3, epochs=20, batch=128,
    ),
    "residual-mnist1d": _task(
        "Residual MLP on MNIST-1D",
        pieces=6, data="mnist1d", model="residual", width=128, depth=24, epochs=100, batch=128,
    ),
    "charformer-shakespeare": _task(
        "Character transformer on Shakespeare",
        pieces=4, data="shakespeare", model="charformer", width=128, depth=4, activation="gelu", epochs=20, batch=64,
    ),
    "resnet18-cifar10": _task(
        "ResNet-18 on CIFAR-10",
        pieces=4, grid=(0.1, 0.2, 0.4), **_CIFAR10, model="resnet18", width=64, epochs=30,
        optimiser="sgd", weight_decay=5e-4, schedule="linear", channels_last=True,
    ),
    "vit-cifar10": _task(
        "Vision transformer on CIFAR-10",
        pieces=4, **_CIFAR10, model="vit", width=288, depth=8, activation="gelu", epochs=60, weight_decay=0.05,
    ),
}  # fmt: skip
TASKS: dict[str, Task] = {name: task for name, task in _ALL.items() if task.known}
