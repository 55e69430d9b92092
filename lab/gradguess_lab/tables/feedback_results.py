"""The study of learned feedback: which runs belong to a line, what the line is called, and how it is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import method_label
from gradguess_lab.plans import FEEDBACK, PRESETS, configs
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run, Variant, variants
from gradguess_lab.tables.welch import difference

QUANTITIES = {"train_accuracy": "Train", "test_accuracy": "Test"}
ROUNDING = 0.0005  # half a unit of the last digit that is shown

RULE = (
    "Against backpropagation: the difference of the means over the seeds. It is called within if a two-sided Welch "
    "test at 5 % does not reject that the means are equal, or if it rounds to 0.000; else below or above. With a "
    "single seed it is not judged."
)
_SAME = ("data", "model", "width", "depth", "activation", "bias", "epochs", "lr", "schedule", "batch")
_WORDS = {
    "every": "tangents every {} steps",
    "fraction": "on {:g} of the batch",
    "sweeps": "{} sweeps",
    "sites": "{} pieces",
    "tangents": "{} tangents",
    "isolate": "one tangent per site",
    "balance": "balanced sites",
    "teacher": "directions of {}",
}


@dataclass(frozen=True)
class Result:
    """One line: a configuration, its runs over the seeds, and backpropagation's in the same setting."""

    config: TrainConfig
    variant: Variant | None
    reference: Variant | None

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def setting(self) -> str:
        c = self.config
        kind = "residual, " if c.model == "residual" else ""
        cosine = ", cosine" if c.schedule == "cosine" else ""
        return f"{kind}depth {c.depth}, width {c.width}, learning rate {c.lr:g}{cosine}"

    @property
    def is_taught(self) -> bool:
        """Whether this is a line of learned feedback that was run."""
        return self.variant is not None and self.config.method.startswith("feedback")

    def ours(self, quantity: str) -> Summary | None:
        return Summary.of(self.variant.values(quantity)) if self.variant else None

    def theirs(self, quantity: str) -> Summary | None:
        return Summary.of(self.reference.values(quantity)) if self.reference else None

    def difference(self, quantity: str) -> tuple[float, str] | None:
        """The difference to backpropagation and what `RULE` calls it; None where either was not run."""
        ours, theirs = self.ours(quantity), self.theirs(quantity)
        if ours is None or theirs is None or self.config.method == "backprop":
            return None
        gap = ours.mean - theirs.mean
        found = difference(theirs, ours)
        if found is None:
            return gap, "one seed"
        low, high = found.interval()
        if low <= 0 <= high or abs(gap) <= ROUNDING:
            return gap, "within"
        return gap, "above" if gap > 0 else "below"


def label(config: TrainConfig) -> str:
    """The method, and in words what is not as usual."""
    default = TrainConfig()
    changed = {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != getattr(default, item.name)
    }
    words = [method_label(config.method)]
    words += ["shared basis"] if config.method == "wperp" and config.solver == "shared" else []
    words += _predictor(config)
    words += [form.format(_plain(changed[name])) for name, form in _WORDS.items() if name in changed]
    return ", ".join(words)


def _predictor(config: TrainConfig) -> list[str]:
    """How `B` comes about, where it is not learned from weighted output tangents."""
    if not config.method.startswith("feedback"):
        return []
    by_itself = config.bootstrap > 0
    if config.learn == "never":
        if config.start == "random":
            alignment = config.method == "feedback-direct"
            return ["fixed random B" + (" (direct feedback alignment)" if alignment else "")]
        return ["B by bootstrap alone, no tangents (synthetic gradients)"] if by_itself else ["B = 0"]
    words = {
        "truth": "B from true gradients (ceiling of the form)",
        "outputs": "taught by output tangents, unweighted",
        "loss": "taught by the loss's derivative alone",
        "momentum": "running mean of raw estimates (FDFA)",
    }
    return [words[config.learn]] if config.learn in words else ["bootstrap anchored by tangents"] if by_itself else []


def _plain(value: object) -> object:
    return method_label(value) if isinstance(value, str) else value


def results_of(configs: Iterable[TrainConfig], runs: Sequence[Run]) -> list[Result]:
    """A line for every configuration, whatever the device; each one once."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)

    def find(config: TrainConfig) -> Variant | None:
        found = variants(groups.get(_identity(Run("", config.as_dict(), {})), []))
        return found[0] if found else None

    return [Result(config, find(config), find(_reference(config))) for config in dict.fromkeys(configs)]


def _reference(config: TrainConfig) -> TrainConfig:
    return TrainConfig(method="backprop", **{name: getattr(config, name) for name in _SAME})


def _identity(run: Run) -> object:
    return tuple(part for part in run.identity if part[0] != "device")


def _planned(experiment: str, runs: Sequence[Run], beside: Sequence[str] = ()) -> list[Result]:
    """The lines of an experiment in the preset that most of these runs belong to, below those of methods `beside`."""
    planned = [configs(experiment, preset) for preset in PRESETS]
    found = [results_of([TrainConfig(method=m, width=p[0].width) for m in beside] + p, runs) for p in planned]
    return max(found, key=lambda results: sum(result.variant is not None for result in results))


def width_results(runs: Sequence[Run]) -> list[Result]:
    return [r for r in _planned("feedback-width", runs) if r.config.schedule == "constant"]


def tuned_results(runs: Sequence[Run]) -> list[Result]:
    return [r for r in _planned("feedback-width", runs) if r.config.schedule == "cosine"]


def depth_results(runs: Sequence[Run]) -> list[Result]:
    return _planned("feedback-depth", runs)


def residual_results(runs: Sequence[Run]) -> list[Result]:
    return _planned("feedback-residual", runs)


def ablation_results(runs: Sequence[Run]) -> list[Result]:
    """The ablations, below the methods that they are ablations of."""
    return _planned("feedback-ablations", runs, [*FEEDBACK, "feedback-corrected", "wperp"])
