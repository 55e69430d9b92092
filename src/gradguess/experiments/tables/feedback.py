"""Learned feedback against backpropagation: the tables of the study that goes beyond the paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gradguess.experiments.config import TrainConfig
from gradguess.experiments.plan import (
    FEEDBACK,
    PRESETS,
    Preset,
    feedback_ablations,
    feedback_depth,
    feedback_residual,
    feedback_width,
)
from gradguess.experiments.tables.compare import Summary
from gradguess.experiments.tables.runs import Run, Variant, command, method_label, variants
from gradguess.experiments.tables.table import Cell, Table, constant, mean_text, number, text

__all__ = [
    "RULE",
    "Result",
    "ablation_results",
    "depth_results",
    "feedback_tables",
    "residual_results",
    "results_of",
    "tuned_results",
    "width_results",
]

QUANTITIES = {"train_accuracy": "Train", "test_accuracy": "Test"}
CHANCE = 0.15  # ten classes: nothing has been learned below this
WIDE = 0.05  # from this standard deviation on, the seeds are listed one by one
ROUNDING = 0.0005  # half a unit of the last digit that is shown

RULE = (
    "Against backpropagation: the difference of the means over the seeds. It is called within if it is no larger than "
    "two standard deviations of that difference (√(s²/n + s²/n), each method with its own s), else below or above; "
    "with a single seed it is not judged."
)
_SETTING = {"Model": "model", "Width": "width", "Depth": "depth", "Learning rate": "lr", "Schedule": "schedule"}
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
    def is_reference(self) -> bool:
        return self.config.method == "backprop"

    def ours(self, quantity: str) -> Summary | None:
        return Summary.of(self.variant.values(quantity)) if self.variant else None

    def theirs(self, quantity: str) -> Summary | None:
        return Summary.of(self.reference.values(quantity)) if self.reference else None

    def difference(self, quantity: str) -> tuple[float, str] | None:
        """To backpropagation, and what `RULE` calls it; nothing where either was not run."""
        ours, theirs = self.ours(quantity), self.theirs(quantity)
        if ours is None or theirs is None or self.is_reference:
            return None
        gap = ours.mean - theirs.mean
        if ours.sd is None or theirs.sd is None:
            return gap, "one seed"
        bar = 2 * math.sqrt(ours.sd**2 / ours.n + theirs.sd**2 / theirs.n)
        if abs(gap) <= max(bar, ROUNDING):
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


# --- which runs belong to a line -----------------------------------------------------------------------------


def results_of(configs: Iterable[TrainConfig], runs: Sequence[Run]) -> list[Result]:
    """A line for every configuration, whatever the device; each one once."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run.config), []).append(run)

    def find(config: TrainConfig) -> Variant | None:
        found = variants(groups.get(_identity(config.as_dict()), []))
        return found[0] if found else None

    return [Result(config, find(config), find(_reference(config))) for config in dict.fromkeys(configs)]


def _reference(config: TrainConfig) -> TrainConfig:
    return TrainConfig(method="backprop", **{name: getattr(config, name) for name in _SAME})


def _identity(config: object) -> object:
    full = {**TrainConfig().as_dict(), **config}  # type: ignore[dict-item]
    return tuple(part for part in Run("", full, {}).identity if part[0] != "device")


def _planned(build: Callable[[Preset], list[TrainConfig]], runs: Sequence[Run]) -> list[Result]:
    """The lines of an experiment in the preset that most of these runs belong to."""
    found = [results_of(build(preset), runs) for preset in PRESETS.values()]
    return max(found, key=lambda results: sum(result.variant is not None for result in results))


def width_results(runs: Sequence[Run]) -> list[Result]:
    return [r for r in _planned(feedback_width, runs) if r.config.schedule == "constant"]


def tuned_results(runs: Sequence[Run]) -> list[Result]:
    return [r for r in _planned(feedback_width, runs) if r.config.schedule == "cosine"]


def depth_results(runs: Sequence[Run]) -> list[Result]:
    return _planned(feedback_depth, runs)


def residual_results(runs: Sequence[Run]) -> list[Result]:
    return _planned(feedback_residual, runs)


def ablation_results(runs: Sequence[Run]) -> list[Result]:
    """The ablations, below the methods that they are ablations of."""

    def build(preset: Preset) -> list[TrainConfig]:
        whole = [*FEEDBACK, TrainConfig(method="feedback-corrected"), TrainConfig(method="wperp")]
        changed = feedback_ablations(preset)
        return [dataclasses.replace(config, width=changed[0].width) for config in whole] + changed

    return _planned(build, runs)


# --- tables --------------------------------------------------------------------------------------------------


def feedback_tables(runs: Sequence[Run]) -> tuple[Table, ...]:
    """Every table that has a run of learned feedback in it."""
    width, tuned, depth = width_results(runs), tuned_results(runs), depth_results(runs)
    residual, ablations = residual_results(runs), ablation_results(runs)
    tables = [
        _table(
            "feedback-width",
            "Learned feedback as the width grows",
            width,
            "Three hidden layers, 300 epochs, learning rate 1e-4, one tangent per step unless said. " + RULE,
        ),
        _table(
            "feedback-tuned",
            "The same with a cosine schedule, three learning rates",
            tuned,
            "Every rate that was tried is shown: none was chosen by its test accuracy. All methods fit the training "
            "data, so the test column is where they differ.",
        ),
        _table(
            "feedback-depth",
            "Learned feedback as the depth grows",
            depth,
            "300 epochs, constant learning rate, no residual connections, no norm. A second sweep applies the chain "
            "rule once more, which is one step further towards backpropagation.",
        ),
        _table(
            "feedback-residual",
            "Residual networks",
            residual,
            "Pre-norm blocks of width 128, 20 epochs, batch 128. Lines with B = 0 show what the chain rule over one "
            "(two) hops does by itself at equal sweeps: the gradient along the skip path is exact without learning.",
        ),
        _table(
            "feedback-ablations",
            "Ablations",
            ablations,
            "Three hidden layers, 300 epochs, learning rate 1e-4. The lines without an addition are the methods as "
            "they are used elsewhere.",
        ),
        _shortfalls([*width, *tuned, *depth, *residual]),
    ]
    return tuple(table for table in tables if table is not None)


def _table(slug: str, title: str, results: list[Result], caption: str) -> Table | None:
    if not any(_taught(result) for result in results):
        return None
    accuracies = [part for name in QUANTITIES.values() for part in (f"{name} accuracy", f"{name} sd")]
    columns = ("Method", *_SETTING, *accuracies, *(f"{name} against backprop" for name in QUANTITIES.values()), "Seeds")
    rows = tuple(_row(result) for result in results)
    hidden = constant(columns, rows, set(_SETTING))
    hidden |= {i for i, name in enumerate(columns) if name.endswith(" sd")}  # shown beside the mean
    commands = {f"{r.label}, {r.setting}": command(r.config.as_dict()) for r in results}
    return Table(slug, title, columns, rows, caption, tuple(commands.items()), hidden)


def _taught(result: Result) -> bool:
    return result.variant is not None and result.config.method.startswith("feedback")


def _row(result: Result) -> tuple[Cell, ...]:
    summaries = {quantity: result.ours(quantity) for quantity in QUANTITIES}
    accuracies = []
    for quantity, summary in summaries.items():
        accuracies += [_accuracy(result.variant, quantity), number(summary.sd if summary else None)]
    train = summaries["train_accuracy"]
    return (
        text(result.label),
        *(_cell(getattr(result.config, name)) for name in _SETTING.values()),
        *accuracies,
        *(_against(result, quantity) for quantity in QUANTITIES),
        number(train.n if train else None, "d"),
    )


def _cell(value: object) -> Cell:
    return number(value, "g") if isinstance(value, (int, float)) else text(value)


def _accuracy(variant: Variant | None, quantity: str) -> Cell:
    """Mean ± sd; below it what a mean would hide."""
    values = variant.values(quantity) if variant else []
    summary = Summary.of(values)
    if summary is None:
        return Cell("not run")
    shown = mean_text(summary.mean, summary.sd)
    note = ""
    if max(values) < CHANCE:
        note = "chance level in every seed" if len(values) > 1 else "chance level"
    elif summary.sd is not None and summary.sd > WIDE:
        note = "seeds: " + ", ".join(f"{value:.3f}" for value in values)
    return Cell(shown, summary.mean, note=note)


def _against(result: Result, quantity: str) -> Cell:
    found = result.difference(quantity)
    if found is None:
        return Cell("–")
    gap, word = found
    return Cell(f"{number(gap, '.3f', signed=True).text} {word}", gap)


def _shortfalls(results: list[Result]) -> Table | None:
    """All lines but controls (B = 0) that stay below backpropagation: the widest gap first."""
    results = [result for result in results if result.config.learn != "never"]
    lines = [
        (found[0], result, quantity)
        for result in results
        for quantity in QUANTITIES
        if (found := result.difference(quantity)) and found[1] == "below"
    ]
    if not any(_taught(result) for result in results):
        return None
    rows = tuple(
        (
            text(result.label),
            text(result.setting),
            text(QUANTITIES[quantity]),
            _accuracy(result.reference, quantity),
            _accuracy(result.variant, quantity),
            number(gap, ".3f", signed=True),
        )
        for gap, result, quantity in sorted(lines, key=lambda line: line[0])
    )
    return Table(
        "feedback-shortfalls",
        "Where it falls short",
        ("Method", "Setting", "Split", "Backpropagation", "Ours", "Difference"),
        rows,
        "Every line of the tables above whose accuracy is below backpropagation's by the rule given there; ablations "
        "and controls (B = 0) are left out. Where backpropagation's own seeds lie far apart, within says little.",
    )
