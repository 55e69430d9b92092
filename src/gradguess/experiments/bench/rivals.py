"""Training steps to be timed: each method on its own copy of one network, and backpropagation as a plain loop."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradguess as gg
from gradguess.errors import InputError
from gradguess.experiments.loss import per_sample_loss
from gradguess.experiments.models import mlp
from gradguess.experiments.names import lookup
from gradguess.model.task import LossFn

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


def _rare(form: Literal["direct", "chained"]) -> Callable[[int], Any]:
    return lambda k: gg.Feedback(gg.WPerp(k=k), form=form, every=4, fraction=0.25)


# name -> (k -> method); "-rare": tangents on a quarter of the batch every fourth step
METHODS: dict[str, Callable[[int], Any]] = {
    "backprop-wrapped": lambda k: gg.Backprop(),
    "weight": lambda k: gg.WeightPerturbation(),
    "activation": lambda k: gg.ActivationPerturbation(),
    "wt": lambda k: gg.WTranspose(),
    "wperp": lambda k: gg.WPerp(k=k),
    "wperp-subspace": lambda k: gg.WPerp(k=k, solver="subspace"),
    "wperp-svd": lambda k: gg.WPerp(k=k, solver="svd"),
    "wperp-bottom": lambda k: gg.WPerp(k=k, end="bottom"),
    "wperp-ns": lambda k: gg.WPerpNS(k=k),
    "wp": lambda k: gg.WPreconditioned(),
    "feedback-direct": lambda k: gg.Feedback(gg.WPerp(k=k), form="direct"),
    "feedback-chained": lambda k: gg.Feedback(gg.WPerp(k=k), form="chained"),
    "feedback-corrected": lambda k: gg.Feedback(gg.WPerp(k=k), form="corrected"),
    "feedback-direct-rare": _rare("direct"),
    "feedback-chained-rare": _rare("chained"),
}
# decompose or multiply a matrix for every sample: too slow for rounds on the whole batch, but for W⊥-NS on a GPU
PER_SAMPLE = {"cpu": ("wperp-svd", "wperp-ns", "wp"), "cuda": ("wperp-svd", "wp")}
RIVAL = "backprop"
DEFAULT = tuple(name for name in METHODS if name not in ("backprop-wrapped", "wperp-bottom", "wperp-ns", "wp"))


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods to time; backpropagation is always among the timed, and first."""
    for name in names:
        if name != RIVAL:
            lookup(METHODS, name, "method")
    return tuple(name for name in names if name != RIVAL) or DEFAULT


class Rival:
    """A training loop that can be run step by step."""

    every = 1  # steps after which the work repeats, apart from refreshes
    refresh = 0  # such rounds between two refreshes of what is cached; 0: nothing is
    forward: gg.ForwardGradient | None = None  # what estimates the gradients; None: nothing does
    loss: LossFn = staticmethod(per_sample_loss)

    def __init__(self, case: Case) -> None:
        self.take(case.network(), *case.data())

    def take(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=x.is_cuda)

    @cached_property
    def turn(self) -> Callable[[], Any]:
        """A step as it is timed: on a GPU replayed from a CUDA graph."""
        return self.captured() if self.x.is_cuda else self.step

    def captured(self) -> Callable[[], Any]:
        if self.forward is not None:
            step = gg.CapturedStep(self.forward, self.optimiser, self.loss)
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
        """By this library, or by backpropagation, as anyone would write it."""
        if self.forward is not None:
            return self.forward(self.loss, self.x, self.y)
        loss = self.mean_loss()
        loss.backward()
        return loss.detach()

    def mean_loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.outputs(), self.y)

    def outputs(self) -> Tensor:
        return self.model(self.x)

    def rewind(self, to_refresh: bool) -> None:
        """Make the next step one that refreshes, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.steps = 0 if to_refresh else self.every


class Checkpointed(Rival):
    """Backpropagation that keeps the activations of every `stride`-th hidden layer and computes the others again."""

    def __init__(self, case: Case, stride: int) -> None:
        super().__init__(case)
        layers = list(self.model.children())
        pairs = [nn.Sequential(*layers[i : i + 2]) for i in range(0, len(layers), 2)]
        self.parts = [nn.Sequential(*pairs[i : i + stride]) for i in range(0, len(pairs), stride)]

    def outputs(self) -> Tensor:
        x = self.x
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


class Guessed(Rival):
    """A method of this library."""

    def __init__(
        self, case: Case, method: Any, memory: Literal["store", "replay"] = "store", sites: int | str = "auto"
    ) -> None:
        super().__init__(case)
        self.forward = gg.ForwardGradient(self.model, method, memory=memory, sites=sites)
        self.every = getattr(method, "every", 1)
        guess = getattr(method, "guess", method)
        self.refresh = guess.refresh if getattr(guess, "refresh", 1) > 1 else 0


def rival(name: str, case: Case) -> Rival:
    """The loop that `name` stands for; dense per-sample methods may have been given a case of fewer samples."""
    return Rival(case) if name == RIVAL else Guessed(case, lookup(METHODS, name, "method")(case.k))


def memory_rival(name: str, case: Case) -> Rival:
    """The loops whose memory is compared over the depth."""
    table: dict[str, Callable[[], Rival]] = {
        "backprop": lambda: Rival(case),
        "checkpoint-all": lambda: Checkpointed(case, 1),
        "checkpoint-sqrt": lambda: Checkpointed(case, max(1, math.isqrt(case.depth))),
        "store": lambda: Guessed(case, gg.WPerp(k=case.k)),
        "replay": lambda: Guessed(case, gg.WPerp(k=case.k), "replay"),
        "feedback-replay": lambda: Guessed(case, gg.Feedback(gg.WPerp(k=case.k), form="direct"), "replay"),
        "pieces-replay": lambda: Guessed(case, _rare("chained")(case.k), "replay", max(2, math.isqrt(case.depth))),
    }
    if name in METHODS:
        return rival(name, case)
    return lookup(table, name, "method")()


MEMORY = ("backprop", "checkpoint-all", "checkpoint-sqrt", "store", "replay", "feedback-replay", "pieces-replay")


def fewer(case: Case, samples: int) -> Case:
    return dataclasses.replace(case, batch=min(case.batch, samples))
