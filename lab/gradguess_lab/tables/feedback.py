"""The study of learned feedback, which goes beyond the paper: its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradguess_lab.methods import method_label, options_of
from gradguess_lab.paper_numbers import LAYER_SITES
from gradguess_lab.tables.runs import DEFAULTS, EXPERIMENT, Group, Run, groups, like
from gradguess_lab.tables.table import Cell, Row, Table, cell, number, table
from gradguess_lab.tables.verdicts import Summary, difference

QUANTITIES = {"train_accuracy": "Train", "test_accuracy": "Test"}
CHANCE = 0.15  # ten classes: nothing has been learned below this
WIDE = 0.05  # from this standard deviation on, the seeds are listed one by one
ROUNDING = 0.0005  # half a unit of the last digit that is shown
RULE = (
    "Against backpropagation: the difference of the means over the seeds. It is called within if a two-sided Welch "
    "test at 5 % does not reject that the means are equal, or if it rounds to 0.000; else below or above. With a "
    "single seed it is not judged."
)
# How `B` comes about where it is not learned from weighted output tangents: the first that fits.
_PREDICTORS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"learn": "never", "start": "random", "method": "feedback-direct"}, "fixed random B (direct feedback alignment)"),
    ({"learn": "never", "start": "random"}, "fixed random B"),
    ({"learn": "never", "bootstrap": 0.0}, "B = 0"),
    ({"learn": "never"}, "B by bootstrap alone, no tangents (synthetic gradients)"),
    ({"learn": "truth"}, "B from true gradients (ceiling of the form)"),
    ({"learn": "outputs"}, "taught by output tangents, unweighted"),
    ({"learn": "loss"}, "taught by the loss's derivative alone"),
    ({"learn": "momentum"}, "running mean of raw estimates (FDFA)"),
    ({"bootstrap": 0.0}, ""),
    ({}, "bootstrap anchored by tangents"),
)
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
_SAME = ("data", "model", "width", "depth", "activation", "bias", "epochs", "lr", "schedule", "batch")
_USUAL = {name: DEFAULTS[name] for name in EXPERIMENT if name not in _SAME} | {"method": "backprop"}


def label(run: Run | Group) -> str:
    """The method, and in words what is not as usual."""
    words = [method_label(run["method"])]
    words += ["shared basis"] if run["method"] == "wperp" and run["solver"] == "shared" else []
    if "learn" in options_of(run["method"]):
        words.append(next(said for what, said in _PREDICTORS if all(run[n] == value for n, value in what.items())))
    for name, form in _WORDS.items():
        if run[name] != DEFAULTS[name]:
            words.append(form.format(method_label(run[name]) if name == "teacher" else run[name]))
    return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Result:
    """One line: runs over the seeds, and backpropagation's in the same setting."""

    group: Group
    reference: Group | None

    @property
    def setting(self) -> str:
        one = self.group
        kind, cosine = "residual, " * (one["model"] == "residual"), ", cosine" * (one["schedule"] == "cosine")
        return f"{kind}depth {one['depth']}, width {one['width']}, learning rate {one['lr']:g}{cosine}"

    def against(self, quantity: str) -> Cell | None:
        """The difference to backpropagation and what `RULE` calls it; None where either was not run."""
        ours = self.group.summary(quantity)
        theirs = self.reference.summary(quantity) if self.reference else None
        if ours is None or theirs is None or self.group["method"] == "backprop":
            return None
        gap = difference(theirs, ours)
        low, high = gap.interval()
        same = low <= 0 <= high or abs(gap.value) <= ROUNDING
        word = "one seed" if math.isnan(gap.error) else "within" if same else "above" if gap.value > 0 else "below"
        return Cell(f"{number(gap.value, '+.3f')} {word}", gap.value)

    @property
    def row(self) -> dict[str, Any]:
        one = self.group
        row: dict[str, Any] = {"Method": label(one)}
        row |= {name: one[name.lower()] for name in ("Model", "Width", "Depth")}
        row |= {"Learning rate": one["lr"], "Schedule": one["schedule"]}
        row |= {f"{name} accuracy": accuracy(one, quantity) for quantity, name in QUANTITIES.items()}
        row |= {f"{name} against backprop": self.against(quantity) for quantity, name in QUANTITIES.items()}
        return row | {"Seeds": len(one.by_seed("train_accuracy"))}

    @property
    def shortfalls(self) -> Iterator[dict[str, Any]]:
        """Where it stays below backpropagation; controls (B = 0) do not count."""
        row = self.row
        for quantity, name in QUANTITIES.items():
            gap = row[f"{name} against backprop"]
            if gap and gap.text.endswith("below") and self.group["learn"] != "never" and self.reference:
                yield {
                    "Method": row["Method"],
                    "Setting": self.setting,
                    "Split": name,
                    "Backpropagation": accuracy(self.reference, quantity),
                    "Ours": row[f"{name} accuracy"],
                    "Difference": gap.value,
                }


def accuracy(group: Group, quantity: str) -> Cell:
    """Mean ± standard deviation, with a note on what a mean would hide."""
    values = list(group.by_seed(quantity).values())
    ours, note = Summary.of(values), ""
    if values and max(values) < CHANCE:
        note = "chance level" + " in every seed" * (len(values) > 1)
    elif ours and ours.sd is not None and ours.sd > WIDE:
        note = "seeds: " + ", ".join(f"{value:.3f}" for value in values)
    return cell(ours, note=note)


def results(runs: Sequence[Run], experiment: str, schedule: str = "") -> list[Result]:
    """A line for every setting of an experiment, whatever the device; none without learned feedback.

    Beside ablations stand the methods that they are ablations of.
    """
    every = groups(runs, any_device=True)
    ablated = {run["width"] for run in runs if "feedback-ablations" in run["experiments"]}

    def chosen(group: Group) -> bool:
        known = group["method"] in ("backprop", "wperp") or group["method"].startswith("feedback")
        usual = all(group[name] == DEFAULTS[name] for name in EXPERIMENT if name not in ("method", "width"))
        whole = known and usual and experiment == "feedback-ablations" and group["width"] in ablated
        return whole or (experiment in group["experiments"] and schedule in ("", group["schedule"]))

    def order(group: Group) -> tuple[Any, ...]:
        where = (group[name] for name in ("schedule", "depth", "width", "lr"))
        unusual = [name for name in EXPERIMENT if name not in (*_SAME, "method") and group[name] != DEFAULTS[name]]
        return *where, bool(unusual), group.rank, unusual, label(group)

    found = sorted(filter(chosen, every), key=order)
    if not any(group["method"].startswith("feedback") for group in found):
        return []
    return [Result(group, like(group, every, _SAME, **_USUAL)) for group in found]


# Of each table: its slug, its title, its experiment and, where that has two, the schedule, and what it says.
TABLES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("feedback-width", "Learned feedback as the width grows", ("feedback-width", "constant"),
     "Three hidden layers, 300 epochs, learning rate 1e-4, one tangent per step unless said. " + RULE),
    ("feedback-tuned", "The same with a cosine schedule, three learning rates", ("feedback-width", "cosine"),
     "Every rate that was tried: none was chosen by its test accuracy. All methods fit the training data."),
    ("feedback-depth", "Learned feedback as the depth grows", ("feedback-depth",),
     "300 epochs, constant learning rate, no residual connections, no norm. A second sweep applies the chain rule once "
     "more, which is one step further towards backpropagation."),
    ("feedback-residual", "Residual networks", ("feedback-residual",),
     "Pre-norm blocks of width 128, 20 epochs, batch 128. Lines with B = 0 show what the chain rule over one (two) "
     "hops does by itself: the gradient along the skip path is exact without learning."),
    ("feedback-ablations", "Ablations", ("feedback-ablations",),
     "Three hidden layers, 300 epochs, learning rate 1e-4. Without an addition: the methods as used elsewhere."),
)  # fmt: skip


def feedback_tables(runs: Sequence[Run]) -> list[Table]:
    """Every table that has a run of learned feedback in it, and all lines that stay below backpropagation."""
    tables, short = [], []
    hidden = ("Model", "Width", "Depth", "Learning rate", "Schedule")
    for slug, title, which, caption in TABLES:
        found = results(runs, *which)
        commands = {f"{label(one.group)}, {one.setting}": one.group.command for one in found}
        tables.append(Table(slug, title, [one.row for one in found], caption, hidden, commands))
        short += [row for one in found for row in one.shortfalls if slug != "feedback-ablations"]
    caption = (
        "Every line of the tables above whose accuracy is below backpropagation's by the rule given there; ablations "
        "and controls (B = 0) are left out. Where backpropagation's own seeds lie far apart, within says little."
    )
    short.sort(key=lambda row: row["Difference"])
    tables += [quality_table(runs), Table("feedback-shortfalls", "Where it falls short", short, caption)]
    return [table for table in tables if table.rows]


@table(
    "feedback-quality",
    "Cosine of one step's estimate with the true gradient",
    "Means over the seeds, at the first diagnosed epoch after the start and at the last.",
    forms={f"Layer {n}": ".2f" for n in LAYER_SITES},
)
def quality_table(runs: Sequence[Run]) -> Iterator[Row]:
    """The cosine of one step's estimate with the true gradient, at every hidden layer, early in training and late."""
    for one in results([run for run in runs if run["diagnostics"]], "feedback-quality"):
        after = [epoch for epoch in one.group.epochs if epoch]
        for epoch in dict.fromkeys((after[0], after[-1])):
            layers = {f"Layer {n}": one.group.summary("cosine", n, epoch=epoch) for n in LAYER_SITES}
            shown = {name: ours and ours.mean for name, ours in layers.items()}
            yield {"Method": label(one.group), "Epoch": epoch, **shown, "Seeds": len(one.group.runs)}
