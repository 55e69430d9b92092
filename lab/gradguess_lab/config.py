"""What is run: one frozen record per training run, the same for every method."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradguess.errors import InputError, check_choice
from gradguess_lab.datasets import DATASETS
from gradguess_lab.methods import METHODS

Solver = Literal["svd", "subspace", "shared", "separable"]
Memory = Literal["store", "replay"]
Derivative = Literal["dual", "finite"]
Top = Literal["guess", "exact"]
# `gradguess_lab.networks`
MODELS = ("mlp", "residual", "cnn", "resnet", "resnet18", "mixer", "vit", "charformer", "gpt", "llama", "gru")
ACTIVATIONS = ("relu", "gelu", "tanh")
DTYPES = ("float32", "float64", "bfloat16")
LEARN = ("weighted", "outputs", "loss", "momentum", "truth", "never")  # `gradguess_lab.studies`
STARTS = ("zero", "random")
SCRIPTS = ("mask", "bottom", "floor")  # `gradguess_lab.scripts`
LONGEST = 200  # characters in a key, which is a directory's name; a longer one ends in its digest


def option(default: Any, text: str, choices: Iterable[str] = (), least: float = -math.inf) -> Any:
    """A field with the text that the command line shows for it, in which `{}` stands for the choices."""
    kept = {"help": text.format(", ".join(choices)), "choices": choices, "least": least}
    return dataclasses.field(default=default, metadata=kept)


class Settings:
    """A frozen dataclass of options, each of which is checked when a record is made."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value, known, least = getattr(self, item.name), item.metadata["choices"], item.metadata["least"]
            if isinstance(item.default, float) and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, item.name, float(value))
            elif known:
                check_choice(item.name, value, known)
            elif type(value) is not type(item.default) and item.type != "int | str":
                raise InputError(f"{item.name} must be {type(item.default).__name__}, found {value!r}.")
            elif isinstance(value, str) and not value.isprintable():  # it would be part of a directory's name
                raise InputError(f"{item.name} must be text that can be printed, found {value!r}.")
            if least > -math.inf and not value >= least:
                raise InputError(f"{item.name} must be at least {least}, found {value!r}.")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrainConfig(Settings):
    """One training run. The defaults are the paper's setting; equal records give equal results.

    >>> TrainConfig(method="wt", width=512).key
    'wt-w512-s0'
    >>> TrainConfig(k=25, seed=1).key
    'wperp-w128-s1-k25'
    """

    data: str = option("mnist1d", "data set: {}", DATASETS)
    samples: int = option(0, "train on this many samples, the first ones; 0: on all of them", least=0)
    holdout: float = option(0.0, "part of the training samples that takes the test set's place in evaluations")
    model: str = option("mlp", "network: {}", MODELS)
    method: str = option("wperp", "how gradients are estimated: {}", METHODS)
    width: int = option(
        128, "units per hidden layer, features per token, or channels of the first convolution", least=1
    )
    depth: int = option(3, "hidden layers, convolutions or blocks", least=1)
    activation: str = option("relu", "elementwise function: {}", ACTIVATIONS)
    bias: bool = option(False, "give the layers of an mlp biases")
    epochs: int = option(300, "passes over the training data", least=1)
    augment: bool = option(False, "move training images by up to 4 pixels and mirror half of them, anew in each epoch")
    optimiser: str = option("adamw", "optimiser: {} (Nesterov's, momentum 0.9)", ("adamw", "sgd"))
    lr: float = option(1e-4, "learning rate, the largest")
    weight_decay: float = option(0.01, "weight decay of the optimiser", least=0)
    schedule: str = option("constant", "learning rate over time: {}", ("constant", "cosine", "linear"))
    warmup: float = option(0.0, "part of all steps over which the learning rate rises to --lr, before the schedule")
    smoothing: float = option(0.0, "label smoothing: part of a target's weight that all classes share, in training")
    batch: int = option(512, "samples per step", least=1)
    seed: int = option(0, "seed of initialisation, shuffling and guesses", least=0)
    k: int | str = option(10, "dimension of the guessing space, or 'rank'")
    solver: Solver = option("shared", "how W⊥ finds its basis: {}", get_args(Solver))
    refresh: int = option(50, "steps between two refreshes of a cached basis", least=1)
    steps: int = option(5, "Newton-Schulz steps (wperp-ns)", least=1)
    threshold: str = option("placed", "where the step of wperp-ns lies: {}", ("placed", "nearest"))
    sigma: float = option(1e-5, "damping of wp", least=0)
    tangents: int = option(1, "directions per step", least=1)
    isolate: bool = option(False, "give each site a tangent of its own, so that sites cause each other no noise")
    memory: Memory = option("store", "keep the activations, or run the pass again: {}", get_args(Memory))
    derivative: Derivative = option(
        "dual", "derivatives by dual numbers, or by differences of plain passes: {}", get_args(Derivative)
    )
    sites: str = option("auto", "where gradients are guessed: auto, leaf, branch, or a number of pieces")
    rate: float = option(0.3, "learning rate of the feedback matrices", least=0)
    student_lr: float = option(1e-3, "learning rate of the students", least=0)
    every: int = option(1, "steps between two tangent passes (feedback)", least=1)
    fraction: float = option(1.0, "part of the batch in a tangent pass (feedback)")
    sweeps: int = option(1, "sweeps of the chain (feedback-chained)", least=1)
    learn: str = option("weighted", "what teaches the feedback: {}", LEARN)
    bootstrap: float = option(0.0, "rate at which the feedback is drawn to its own chained estimate", least=0)
    start: str = option("zero", "feedback matrices at the start: {}", STARTS)
    teacher: str = option("wperp", "guess that teaches the feedback: {}", ("wperp", "wt", "activation"))
    balance: bool = option(False, "scale each site's directions to the tangent from below")
    top: Top = option("guess", "at the network's output guess, or take the derivative of the loss: {}", get_args(Top))
    dtype: str = option("float32", "number format: {}", DTYPES)
    autocast: bool = option(False, "compute in bfloat16 under autocast; weights and their updates keep --dtype")
    channels_last: bool = option(False, "lay out images and convolutions with channels last, faster on some GPUs")
    matmul: str = option(
        "highest", "precision of float32 products on a GPU: highest, or high (TF32)", ("highest", "high")
    )
    device: str = option("cpu", "device of PyTorch, such as cpu or cuda")
    compile: bool = option(False, "compile the steps: seconds to minutes at the start, which pay in long runs")
    eval_every: int = option(10, "epochs between two evaluations", least=1)
    diagnose: str = option("", "when the guess is diagnosed: 10 is every ten epochs, 0,1,10 is after these epochs")
    script: str = option("", "as in the authors' scripts, a list with commas out of: " + ", ".join(SCRIPTS))

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and re.fullmatch(r"-?\d{1,18}", self.k):  # the command line hands over text
            object.__setattr__(self, "k", int(self.k))
        if isinstance(self.diagnose, int):
            object.__setattr__(self, "diagnose", str(self.diagnose or ""))
        super().__post_init__()
        script_names(self.script)
        _epochs(self.diagnose)
        if not (0 < self.lr < math.inf):
            raise InputError(f"lr must be positive and finite, found {self.lr!r}.")
        if not (0 < self.fraction <= 1):
            raise InputError(f"fraction must lie in (0, 1], found {self.fraction!r}.")
        for name in ("warmup", "smoothing", "holdout"):
            if not (0 <= getattr(self, name) < 1):
                raise InputError(f"{name} must lie in [0, 1), found {getattr(self, name)!r}.")
        if self.k != "rank" and not (isinstance(self.k, int) and self.k >= 1):
            raise InputError(f"k must be at least 1, or 'rank', found {self.k!r}.")

    @property
    def key(self) -> str:
        """A name for the run, readable and unique: method, width, seed, then whatever is not the default."""
        parts = [self.method, f"w{self.width}", f"s{self.seed}"]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in ("method", "width", "seed") and value != item.default:
                parts.append(
                    f"{item.name.replace('_', '')}{value:g}" if isinstance(value, float) else f"{item.name}{value}"
                )
        whole = "-".join(parts).replace("/", "_").replace(":", "").replace(",", "+")
        if len(whole) <= LONGEST:
            return whole
        return f"{whole[: LONGEST - 9]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    def diagnosed(self, epoch: int) -> bool:
        """Is the guess diagnosed after this epoch?

        >>> config = TrainConfig(diagnose="0,1,10")
        >>> [epoch for epoch in range(300) if config.diagnosed(epoch)]
        [0, 1, 10]
        """
        epochs = _epochs(self.diagnose)
        if len(epochs) != 1 or "," in self.diagnose:
            return epoch in epochs
        return epoch > 0 and (epoch % epochs[0] == 0 or epoch == self.epochs)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The record with these fields; fields that are not given keep their defaults."""
        for name in values:
            check_choice("option", name, [item.name for item in dataclasses.fields(cls)])
        return cls(**values)


def script_names(script: str) -> tuple[str, ...]:
    """The names in "mask,floor"; refused if one is not known."""
    names = tuple(name for name in script.split(",") if name)
    for name in names:
        if name not in SCRIPTS:
            raise InputError(f"script: expected names out of {', '.join(SCRIPTS)}, found {name!r}.")
    return names


def _epochs(diagnose: str) -> tuple[int, ...]:
    """The numbers in "0,1,10"."""
    parts = [part.strip() for part in diagnose.split(",") if part.strip()]
    wrong = next((part for part in parts if not re.fullmatch(r"\d{1,18}", part)), None)
    if wrong is not None or (len(parts) == 1 and "," not in diagnose and int(parts[0]) == 0):
        raise InputError(
            f"diagnose: expected a number of epochs, or a list of epochs such as 0,1,10; found {diagnose!r}."
        )
    return tuple(int(part) for part in parts)


def differences(ours: Settings, theirs: dict[str, Any]) -> list[str]:
    """One line for each field in which a stored configuration is another than `ours`; what it lacks has its default."""
    mine = ours.as_dict()
    defaults = {item.name: item.default for item in dataclasses.fields(ours)}  # type: ignore[arg-type]
    both = {name: (theirs.get(name, defaults.get(name)), mine.get(name, "absent")) for name in mine | theirs}
    return [f"{name}: {there!r} there, {here!r} here" for name, (there, here) in sorted(both.items()) if there != here]


def misfit(row: dict[str, Any], settings: Any) -> str:
    """Why a record is no whole result of these settings; empty if it is one."""
    if row.get("key") != settings.key or not isinstance(row.get("config"), dict):
        return f"is not that of {settings.key}; delete it to have it written again"
    if found := differences(settings, row["config"]):
        return f"is of another configuration ({'; '.join(found)}). Choose another --out"
    metrics = row.get("metrics", row if "error" in row else None)
    if not metrics and not row.get("failed"):
        return "holds no metrics; delete it to have it written again"
    return ""
