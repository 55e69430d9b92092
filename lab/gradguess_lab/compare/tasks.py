"""The tasks of the comparison. To add one, add a line to `TASKS`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.recipes import RECIPES

GRID = (3e-4, 1e-3, 3e-3)  # learning rates of AdamW
SHORT = 4  # a run that chooses a learning rate has this part of the epochs
_COMMON = TrainConfig(schedule="cosine", rate=0.1, eval_every=1)


@dataclass(frozen=True)
class Task:
    """A network on data.

    Attributes:
        title: in tables and figures.
        config: how backpropagation would train it.
        pieces: into how many the network is cut, for methods that work in pieces.
        grid: learning rates that every method is tried with.
    """

    title: str
    config: TrainConfig
    pieces: int
    grid: tuple[float, ...] = GRID


def _task(title: str, pieces: int, **settings: Any) -> Task:
    return Task(title, dataclasses.replace(_COMMON, **settings), pieces)


def _recipe(title: str, pieces: int, name: str, grid: tuple[float, ...] = GRID) -> Task:
    config = dataclasses.replace(RECIPES[name], rate=_COMMON.rate, eval_every=_COMMON.eval_every)
    return Task(title, config, pieces, grid)


TASKS: dict[str, Task] = {
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
    "resnet18-cifar10": _recipe("ResNet-18 on CIFAR-10", 4, "resnet18-cifar10", grid=(0.1, 0.2, 0.4)),
    "vit-cifar10": _recipe("Vision transformer on CIFAR-10", 4, "vit-cifar10"),
}  # fmt: skip
