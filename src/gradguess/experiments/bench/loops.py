"""The training loops that are timed, each on its own copy of one network."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradguess as gg
from gradguess.errors import InputError
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.loss import per_sample_loss
from gradguess.experiments.methods import options_of, settings_of
from gradguess.experiments.models import mlp
from gradguess.experiments.train import build_forward

INPUTS, CLASSES = 40, 10  # those of MNIST-1D


@dataclass(frozen=True)
class Case:
    """One setting in which all methods are timed."""

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


def grid(**axes: Iterable[Any]) -> list[Case]:
    """Every combination of the given values.

    >>> [case.width for case in grid(width=[64, 128], depth=[3])]
    [64, 128]
    """
    return [Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


BACKPROP = "backprop"  # the loop that all others are compared with
TIMED = (
    *("weight", "activation", "wt", "wperp", "wperp-subspace", "wperp-svd"),
    *("feedback-direct", "feedback-chained", "feedback-corrected", "feedback-direct-rare", "feedback-chained-rare"),
)
MEASURED = ("backprop", "checkpoint-all", "checkpoint-sqrt", "store", "replay", "feedback-replay", "pieces-replay")
# These decompose or multiply a matrix for every sample: too slow for rounds on the whole batch, except W⊥-NS on a GPU.
PER_SAMPLE = {"cpu": ("wperp-svd", "wperp-ns", "wp"), "cuda": ("wperp-svd", "wp")}
_STRIDES: dict[str, Callable[[int], int]] = {
    "checkpoint-all": lambda depth: 1,
    "checkpoint-sqrt": lambda depth: max(1, math.isqrt(depth)),
}


def check_methods(names: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    """The names that were asked for, each of them known; `default` if none were."""
    for name in names:
        settings_of(name)
    return names or default


class Loop:
    """A training loop that is run step by step: backpropagation as anyone would write it."""

    every = 1  # the number of steps after which the work repeats, apart from refreshes
    refresh = 0  # the number of such rounds between two refreshes of what is cached; 0 if nothing is cached
    forward: gg.ForwardGradient | None = None  # what estimates the gradients; None for backpropagation

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=x.is_cuda)

    @cached_property
    def turn(self) -> Callable[[], Any]:
        """A step as it is timed: on a GPU replayed from a CUDA graph."""
        return self.captured() if self.x.is_cuda else self.step

    def captured(self) -> Callable[[], Any]:
        if self.forward is not None:
            step = gg.CapturedStep(self.forward, self.optimiser, per_sample_loss)
            return lambda: step(self.x, self.y)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimiser.zero_grad()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def step(self) -> Tensor:
        self.optimiser.zero_grad()
        loss = self.differentiate()
        self.optimiser.step()
        return loss

    def differentiate(self) -> Tensor:
        """Compute the gradients, and return the mean loss."""
        if self.forward is not None:
            return self.forward(per_sample_loss, self.x, self.y)
        loss = nn.functional.cross_entropy(self.outputs().flatten(0, -2), self.y.flatten())
        loss.backward()
        return loss.detach()

    def outputs(self) -> Tensor:
        return self.model(self.x)

    def rewind(self, to_refresh: bool) -> None:
        """Make the next step one that refreshes, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.state = dataclasses.replace(self.forward.state, count=0 if to_refresh else self.every)


class CheckpointedLoop(Loop):
    """Backpropagation that keeps the activations of every `stride`-th hidden layer and computes the others again."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, stride: int) -> None:
        super().__init__(model, x, y)
        layers = list(self.model.children())
        pairs = [nn.Sequential(*layers[i : i + 2]) for i in range(0, len(layers), 2)]
        self.parts = [nn.Sequential(*pairs[i : i + stride]) for i in range(0, len(pairs), stride)]

    def outputs(self) -> Tensor:
        x = self.x
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


class GuessedLoop(Loop):
    """A method of this library."""

    def __init__(self, config: TrainConfig, model: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__(model, x, y)
        self.forward = build_forward(config, model)
        self.every = config.every
        self.refresh = config.refresh if "refresh" in options_of(config.method) and config.refresh > 1 else 0


def make_loop(name: str, case: Case) -> Loop:
    """The loop that `name` stands for, on the network and the data of `case`."""
    model, (x, y) = case.network(), case.data()
    if name == BACKPROP:
        return Loop(model, x, y)
    if name in _STRIDES:
        return CheckpointedLoop(model, x, y, _STRIDES[name](case.depth))
    settings = settings_of(name)
    if name == "pieces-replay":
        settings["sites"] = str(max(2, math.isqrt(case.depth)))
    return GuessedLoop(TrainConfig(**settings, **dataclasses.asdict(case)), model, x, y)


def fewer(case: Case, samples: int) -> Case:
    """The same case with at most `samples` samples."""
    return dataclasses.replace(case, batch=min(case.batch, samples))
