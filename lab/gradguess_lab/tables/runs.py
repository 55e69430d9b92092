"""Finished runs as the tables see them: which runs belong together, and what was measured in them."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import OPTIONS, method_label, options_of
from gradguess_lab.paper_numbers import LAYER_SITES, SETTING

# The parts of a configuration that say which experiment a run is. Runs that agree in all of these are repetitions
# of each other, whatever their seed. `device` is among them, since times and memory depend on it.
_DEFAULTS = {option.name: option.default for option in dataclasses.fields(TrainConfig)}
IDENTITY = tuple(name for name in _DEFAULTS if name not in {"seed", "eval_every", "diagnose"})

_NAMING = ("data", "method", "width", "depth", "epochs", "lr", "batch", "seed")

# These stand in a column of their own, or belong to the paper's setting.
_NAMED = {"data", "model", "method", "width", "depth", "epochs", "k", "script"}
SOLVERS = {
    "svd": "each sample's own subspace, by SVD",
    "subspace": "each sample's own subspace",
    "shared": "shared basis",
}
_THRESHOLDS = {"nearest": "nearest set", "placed": "threshold placed"}


@dataclass(frozen=True)
class Run:
    """One finished run: what was asked for, what came out, and where it ran."""

    key: str
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, float]] = ()
    diagnostics: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    experiments: Sequence[str] = ()
    task: str = ""
    variant: str = ""

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown"))

    @property
    def label(self) -> str:
        """The method, with `k` where it has one."""
        k = self.config.get("k")
        named = method_label(self.method)
        return f"{named}, k = {k}" if k is not None and "k" in options_of(self.method) else named

    @cached_property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, self._part(name)) for name in IDENTITY if self._part(name) is not None)

    def _part(self, name: str) -> Any:
        if name in OPTIONS and name not in options_of(self.method):
            return None
        if name == "script":
            return ",".join(toggles(self))
        value = setting(self, name)
        if name == "device" and isinstance(value, str):
            return value.partition(":")[0]  # cuda:0 and cuda:1 are the same kind
        return value if isinstance(value, (str, int, float, type(None))) else repr(value)


@dataclass(frozen=True)
class Variant:
    """Repetitions of one experiment, one run per seed."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def device(self) -> str:
        return str(dict(self.first.identity).get("device", "cpu"))

    @property
    def label(self) -> str:
        """How this experiment was computed, where that is a choice: the solver, and what is not as usual."""
        parts = dict(self.first.identity)
        solver, threshold = str(parts.pop("solver", "")), str(parts.pop("threshold", ""))
        if self.first.method == "wperp-bottom" and solver != "svd":
            solver = "closed units"  # any k of them are a bottom-k subspace
        words = [SOLVERS.get(solver, solver)] if solver else []
        words += [_THRESHOLDS.get(threshold, threshold)] if self.first.method == "wperp-ns" else []
        words += [f"as the scripts: {' and '.join(toggles(self.first))}"] if toggles(self.first) else []
        unusual = {name: value for name, value in parts.items() if value != _DEFAULTS[name] and name not in _NAMED}
        words += [str(value) if name in {"device", "dtype"} else f"{name} {value}" for name, value in unusual.items()]
        return " · ".join(words)

    @property
    def by_definition(self) -> bool:
        """Whether W⊥ takes each sample's own subspace, and W⊥-NS the nearest set, as the paper has it."""
        parts = dict(self.first.identity)
        if self.first.method == "wperp":
            return parts.get("solver") in {"svd", "subspace"}
        return self.first.method != "wperp-ns" or parts.get("threshold") == "nearest"

    def values(self, quantity: str, layer: int | None = None, **where: Any) -> list[float]:
        """The quantity in every run that measured it."""
        found = (measure(run, quantity, layer, **where) for run in self.runs)
        return [value for value in found if value is not None]


def setting(run: Run, name: str) -> Any:
    """A part of the configuration; an older record lacks the newest options."""
    return run.config.get(name, _DEFAULTS[name])


def toggles(run: Run) -> tuple[str, ...]:
    """What the run does as the authors' scripts do it and the paper does not say, in alphabetical order."""
    return tuple(sorted(word.strip() for word in str(run.config.get("script") or "").split(",") if word.strip()))


def measure(
    run: Run, quantity: str, layer: int | None = None, epoch: int | None = None, batch: str = "sites"
) -> float | None:
    """A final metric, or with `layer` a diagnostic of that layer, at the last diagnosed epoch if none is given.

    `batch` is "sites" for the first samples of the training data, "last_batch" for the last batch of an epoch.
    """
    if layer is None:
        return run.metrics.get(quantity)
    return diagnosis(run, layer, epoch, batch).get(quantity)


def diagnosis(run: Run, layer: int, epoch: int | None = None, batch: str = "sites") -> Mapping[str, Any]:
    """What was measured at a layer; empty if nothing was."""
    found = {entry["epoch"]: entry for entry in run.diagnostics if batch in entry}
    if not found:
        return {}
    entry = found.get(max(found) if epoch is None else epoch, {})
    return entry.get(batch, {}).get(LAYER_SITES[layer], {})


def overlap_of(run: Run, layer: int) -> Sequence[float]:
    """The overlap of the gradient with the k leading directions, for k = 1, 2, ...; empty if not diagnosed."""
    return diagnosis(run, layer).get("overlap") or ()


def select(
    runs: Iterable[Run], method: str, width: int, k: int | str | None = None, script: str = "", **options: object
) -> list[Variant]:
    """The runs of one entry of the paper, in its setting; several variants if computed in several ways.

    `script` names what is done as in the authors' scripts, in alphabetical order; `options` are further settings.
    """
    chosen = [
        run
        for run in runs
        if run.method == method
        and run.config.get("width") == width
        and in_paper_setting(run, script)
        and (k is None or _same_k(run, k))
        and all(setting(run, name) == value for name, value in options.items())
    ]
    return variants(chosen)


def variants(runs: Iterable[Run]) -> list[Variant]:
    """Group runs that differ in their seed only; the same seed twice counts once.

    What the paper defines comes first, then what has most seeds: the first is the main row of every table.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[Any, Run]] = {}
    for run in runs:
        groups.setdefault(run.identity, {}).setdefault(run.config.get("seed"), run)
    found = [Variant(tuple(group[seed] for seed in sorted(group, key=repr))) for group in groups.values()]
    return sorted(found, key=lambda variant: (not variant.by_definition, -len(variant.runs), variant.label))


def in_paper_setting(run: Run, script: str = "") -> bool:
    """Whether the run is one that the paper's numbers may be held against."""
    return ",".join(toggles(run)) == script and all(
        _equal(run.config.get(name, expected), expected) for name, expected in SETTING.items()
    )


def _equal(found: object, expected: object) -> bool:
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-9)
    return found == expected


def _same_k(run: Run, k: int | str) -> bool:
    found, width = run.config.get("k"), run.config["width"]
    if k == "rank":  # a k that no Jacobian of this width can exceed keeps its whole image
        return found == "rank" or (isinstance(found, int) and found >= width)
    return found == k


def command(config: Mapping[str, Any]) -> str:
    """The command that repeats a run: what names it, and then whatever is not the default.

    >>> command({"method": "wt", "width": 128, "k": 25, "lr": 1e-4, "seed": 0, "diagnose": 10})
    'gradguess train --method wt --width 128 --lr 0.0001 --seed 0 --diagnose 10'
    """
    read = options_of(str(config.get("method")))
    words = ["gradguess", "train"]
    for name in (*_NAMING, *(name for name in config if name not in _NAMING)):
        value = config.get(name)
        unread = name in OPTIONS and name not in read
        if value is None or unread or (name not in _NAMING and value == _DEFAULTS.get(name, value)):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
