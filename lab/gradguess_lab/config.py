"""What is run: one frozen record per training run, the same for every method."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradguess.errors import InputError
from gradguess_lab.datasets import DATASETS
from gradguess_lab.methods import METHODS
from gradguess_lab.models import ACTIVATIONS, MODELS
from gradguess_lab.names import unknown

Solver = Literal["svd", "subspace", "shared"]
Memory = Literal["store", "replay"]
Derivative = Literal["dual", "finite"]
Top = Literal["guess", "exact"]
LEARN = ("weighted", "outputs", "loss", "momentum", "truth", "never")  # `gradguess_lab.studies`
STARTS = ("zero", "random")
SCRIPTS = ("mask", "bottom", "floor")  # `gradguess_lab.scripts`
CHOICES: dict[str, Iterable[str]] = {
    "data": DATASETS,
    "model": MODELS,
    "method": METHODS,
    "activation": ACTIVATIONS,
    "solver": get_args(Solver),
    "threshold": ("placed", "nearest"),
    "memory": get_args(Memory),
    "derivative": get_args(Derivative),
    "top": get_args(Top),
    "dtype": ("float32", "float64", "bfloat16"),
    "optimiser": ("adamw", "sgd"),
    "schedule": ("constant", "cosine", "linear"),
    "learn": LEARN,
    "start": STARTS,
    "matmul": ("highest", "high"),
    "teacher": ("wperp", "wt", "activation"),
}
# what runs did that do not know these options
BEFORE: dict[str, Any] = {
    "script": "",
    "threshold": "nearest",
    "derivative": "dual",
    "top": "guess",
    "compile": False,
    "augment": False,
    "optimiser": "adamw",
    "warmup": 0.0,
    "smoothing": 0.0,
    "autocast": False,
    "channels_last": False,
}
LONGEST = 200  # characters in a key, which is a directory's name; a longer one ends in its digest
AT_LEAST_ONE = ("width", "depth", "epochs", "batch", "refresh", "every", "eval_every", "steps", "sweeps", "tangents")
AT_LEAST_ZERO = ("samples", "seed", "weight_decay", "rate", "student_lr", "sigma", "bootstrap")


def option(default: Any, text: str) -> Any:
    """A field with the text that the command line shows for it; `{name}` stands for the choices of that field."""
    listed = {name: ", ".join(known) for name, known in (CHOICES | {"script": SCRIPTS}).items()}
    return dataclasses.field(default=default, metadata={"help": text.format(**listed)})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The defaults are the paper's setting; equal records give equal results.

    >>> TrainConfig(method="wt", width=512).key
    'wt-w512-s0'
    >>> TrainConfig(k=25, seed=1).key
    'wperp-w128-s1-k25'
    """

    data: str = option("mnist1d", "data set: {data}")
    samples: int = option(0, "train on this many samples, the first ones; 0: on all of them")
    model: str = option("mlp", "network: {model}")
    method: str = option("wperp", "how gradients are estimated: {method}")
    width: int = option(128, "units per hidden layer, features per token, or channels of the first convolution")
    depth: int = option(3, "hidden layers, convolutions or blocks")
    activation: str = option("relu", "elementwise function: {activation}")
    bias: bool = option(False, "give the layers of an mlp biases")
    epochs: int = option(300, "passes over the training data")
    augment: bool = option(False, "move training images by up to 4 pixels and mirror half of them, anew in each epoch")
    optimiser: str = option("adamw", "optimiser: {optimiser} (Nesterov's, momentum 0.9)")
    lr: float = option(1e-4, "learning rate, the largest")
    weight_decay: float = option(0.01, "weight decay of the optimiser")
    schedule: str = option("constant", "learning rate over time: {schedule}")
    warmup: float = option(0.0, "part of all steps over which the learning rate rises to --lr, before the schedule")
    smoothing: float = option(0.0, "label smoothing: part of a target's weight that all classes share, in training")
    batch: int = option(512, "samples per step")
    seed: int = option(0, "seed of initialisation, shuffling and guesses")
    k: int | str = option(10, "dimension of the guessing space, or 'rank'")
    solver: Solver = option("shared", "how W⊥ finds its basis: {solver}")
    refresh: int = option(50, "steps between two refreshes of a cached basis")
    steps: int = option(5, "Newton-Schulz steps (wperp-ns)")
    threshold: str = option("placed", "where the step of wperp-ns lies: {threshold}")
    sigma: float = option(1e-5, "damping of wp")
    tangents: int = option(1, "directions per step")
    isolate: bool = option(False, "give each site a tangent of its own, so that sites cause each other no noise")
    memory: Memory = option("store", "keep the activations, or run the pass again: {memory}")
    derivative: Derivative = option(
        "dual", "derivatives by dual numbers, or by differences of plain passes: {derivative}"
    )
    sites: str = option("auto", "where gradients are guessed: auto, leaf, branch, or a number of pieces")
    rate: float = option(0.3, "learning rate of the feedback matrices")
    student_lr: float = option(1e-3, "learning rate of the students")
    every: int = option(1, "steps between two tangent passes (feedback)")
    fraction: float = option(1.0, "part of the batch in a tangent pass (feedback)")
    sweeps: int = option(1, "sweeps of the chain (feedback-chained)")
    learn: str = option("weighted", "what teaches the feedback: {learn}")
    bootstrap: float = option(0.0, "rate at which the feedback is drawn to its own chained estimate")
    start: str = option("zero", "feedback matrices at the start: {start}")
    teacher: str = option("wperp", "guess that teaches the feedback: {teacher}")
    balance: bool = option(False, "scale each site's directions to the tangent from below")
    top: Top = option("guess", "at the network's output guess, or take the derivative of the loss: {top}")
    dtype: str = option("float32", "number format: {dtype}")
    autocast: bool = option(False, "compute in bfloat16 under autocast; weights and their updates keep --dtype")
    channels_last: bool = option(False, "lay out images and convolutions with channels last, faster on some GPUs")
    matmul: str = option("highest", "precision of float32 products on a GPU: highest, or high (TF32)")
    device: str = option("cpu", "device of PyTorch, such as cpu or cuda")
    compile: bool = option(False, "compile the steps: seconds to minutes at the start, which pay in long runs")
    eval_every: int = option(10, "epochs between two evaluations")
    diagnose: str = option("", "when the guess is diagnosed: 10 is every ten epochs, 0,1,10 is after these epochs")
    script: str = option("", "as in the authors' scripts, a list with commas out of: {script}")

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and re.fullmatch(r"-?\d{1,18}", self.k):  # the command line hands over text
            object.__setattr__(self, "k", int(self.k))
        if isinstance(self.diagnose, int):
            object.__setattr__(self, "diagnose", str(self.diagnose or ""))
        _check(self)

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The record with these fields; fields that are not given keep their defaults."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("option", name, known)
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


def differences(ours: TrainConfig, theirs: dict[str, Any]) -> list[str]:
    """One line for each field in which a stored configuration is another than `ours`."""
    mine = ours.as_dict()
    theirs = _completed(theirs)
    return [
        f"{name}: {theirs.get(name, 'absent')!r} there, {mine.get(name, 'absent')!r} here"
        for name in sorted(mine.keys() | theirs.keys())
        if theirs.get(name, "absent") != mine.get(name, "absent")
    ]


def _completed(stored: dict[str, Any]) -> dict[str, Any]:
    """A configuration that was stored before there were some of the options, with what they were then."""
    found = {**BEFORE, **stored}
    if found.get("method") != "wperp-ns":  # no other method reads it
        found["threshold"] = stored.get("threshold", TrainConfig.threshold)
    if isinstance(found.get("diagnose"), int):
        found["diagnose"] = str(found["diagnose"] or "")
    return found


def _check(config: TrainConfig) -> None:
    for name, known in CHOICES.items():
        if getattr(config, name) not in list(known):  # a list: the value may be anything, hashable or not
            raise unknown(name, str(getattr(config, name)), known)
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(item.default, float) and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, item.name, float(value))
        elif type(value) is not type(item.default) and item.name != "k":
            raise InputError(f"{item.name} must be {type(item.default).__name__}, found {value!r}.")
        elif isinstance(value, str) and not value.isprintable():  # it would be part of a directory's name
            raise InputError(f"{item.name} must be text that can be printed, found {value!r}.")
    script_names(config.script)
    _epochs(config.diagnose)
    for names, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for name in names:
            if not getattr(config, name) >= least:
                raise InputError(f"{name} must be at least {least}, found {getattr(config, name)!r}.")
    if not (0 < config.lr < float("inf")):
        raise InputError(f"lr must be positive and finite, found {config.lr!r}.")
    if not (0 < config.fraction <= 1):
        raise InputError(f"fraction must lie in (0, 1], found {config.fraction!r}.")
    for name in ("warmup", "smoothing"):
        if not (0 <= getattr(config, name) < 1):
            raise InputError(f"{name} must lie in [0, 1), found {getattr(config, name)!r}.")
    if config.k != "rank" and not (isinstance(config.k, int) and config.k >= 1):
        raise InputError(f"k must be at least 1, or 'rank', found {config.k!r}.")
