"""What is timed: a network with one batch of data, the same for every method."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Dataset, load
from gradguess_lab.models.mlp import mlp
from gradguess_lab.train import autocast, build_model

INPUTS, CLASSES = 40, 10  # those of MNIST-1D


class Setting(Protocol):
    """A network and its batch. Each call of `network` makes another one with the same weights."""

    @property
    def depth(self) -> int: ...

    def network(self) -> nn.Module: ...

    def data(self) -> tuple[Tensor, Tensor]: ...

    def config(self, settings: dict[str, Any]) -> TrainConfig: ...

    def precision(self) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Case:
    """The paper's network on random numbers."""

    width: int = 128
    depth: int = 3
    batch: int = 512
    k: int = 10
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("width", "depth", "batch", "k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise InputError(f"dtype: expected float32, float64 or bfloat16, found {self.dtype!r}.")

    def network(self) -> nn.Sequential:
        model = mlp(INPUTS, self.width, self.depth, CLASSES)
        return model.to(self.device, getattr(torch, self.dtype))

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch, INPUTS, generator=generator).to(self.device, getattr(torch, self.dtype))
        return x, torch.randint(CLASSES, (self.batch,), generator=generator).to(self.device)

    def config(self, settings: dict[str, Any]) -> TrainConfig:
        return TrainConfig(**settings, **dataclasses.asdict(self))

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class RealCase:
    """A task of the study of real networks, on the first batch of its data."""

    task: TrainConfig

    @property
    def depth(self) -> int:
        return self.task.depth

    @cached_property
    def _batch(self) -> Dataset:
        data = load(self.task.data).first(self.task.batch)
        return data.to(self.task.device, getattr(torch, self.task.dtype))

    def network(self) -> nn.Module:
        return build_model(self.task, self._batch)

    def data(self) -> tuple[Tensor, Tensor]:
        return self._batch.x_train, self._batch.y_train

    def config(self, settings: dict[str, Any]) -> TrainConfig:
        return dataclasses.replace(self.task, **settings)

    def precision(self) -> AbstractContextManager[Any]:
        return autocast(self.task)


def grid(**axes: Iterable[Any]) -> list[Case]:
    """Every combination of the given values.

    >>> [case.width for case in grid(width=[64, 128], depth=[3])]
    [64, 128]
    """
    return [Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def fewer(case: Case, samples: int) -> Case:
    """The same case with at most `samples` samples."""
    return dataclasses.replace(case, batch=min(case.batch, samples))
