"""The common-network experiment: which settings explain the paper's variances and biases at width 128.

A setting is a way of training, a use of biases, a number of epochs and a way of measuring (`WAYS`). It explains the six
numbers, `SIX`, only if all of them lie in their intervals at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from gradguess_lab.common_network import BIASES, EPOCHS, TRAINED
from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import BIAS_VARIANCE, Published
from gradguess_lab.tables.table import Table, cell, number
from gradguess_lab.tables.verdicts import HOLDS, Summary, verdict

# ours: the expected variance, and any closed units for W⊥-bottom. scripts: the variance of one draw for each sample,
# and the null vectors of an SVD.
WAYS = ("ours", "scripts")
SIX = {
    f"{method_label(entry.method)} {entry.quantity}": entry
    for entry in BIAS_VARIANCE
    if entry.quantity != "covariance_norm"
}
NORM = next(entry for entry in BIAS_VARIANCE if (entry.method, entry.quantity) == ("wt", "covariance_norm"))
BOTTOM = ("wperp-bottom", "variance")


@dataclass(frozen=True)
class Setting:
    """What the networks of a setting have of the six numbers."""

    trained: str
    biases: str
    epochs: int
    way: str
    rows: Sequence[Mapping[str, Any]]  # a measured network each
    found: Mapping[str, Summary]

    @property
    def held(self) -> set[str]:
        """The numbers that hold."""
        return {name for name, ours in self.found.items() if verdict(SIX[name], ours) == HOLDS}

    @property
    def labels(self) -> dict[str, Any]:
        label = "W⊥-bottom, reduced SVD" if self.trained == "reduced" else method_label(self.trained)
        return {"Trained by": label, "Biases": self.biases, "Epochs": self.epochs, "Measured as": self.way}


def value(row: Mapping[str, Any], entry: Published, way: str) -> float:
    """One of the six numbers on one network."""
    names = {"wperp-bottom": "script-bottom", "variance": "drawn"} if way == "scripts" else {}
    return row["guesses"][names.get(entry.method, entry.method)][names.get(entry.quantity, entry.quantity)]


def settings(rows: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Each setting with networks that were measured."""
    made = []
    for epochs, biases, trained, way in product(EPOCHS, BIASES, TRAINED, WAYS):
        key = {"trained": trained, "biases": biases, "epochs": epochs}
        chosen = [row for row in rows if key.items() <= row.items()]
        found = {name: Summary.of([value(row, entry, way) for row in chosen]) for name, entry in SIX.items()}
        summaries = {name: ours for name, ours in found.items() if ours}
        made += [Setting(trained, biases, epochs, way, chosen, summaries)] if chosen else []
    return made


def settings_table(tried: Sequence[Setting]) -> Table:
    """The six numbers of each setting below the paper's."""
    rows: list[dict[str, Any]] = [{"Trained by": "the paper", **dict.fromkeys(("Biases", "Epochs", "Measured as"), "")}]
    rows[0] |= {name: number(entry.value, ".2e") for name, entry in SIX.items()}
    rows[0] |= {"Hold": "", "Seeds": "", "Train accuracy": "", "Wᵀ covariance norm": NORM.printed}
    for one in tried:
        numbers = {name: cell(ours, ".2e", verdict(SIX[name], ours)) for name, ours in one.found.items()}
        rest = {"Hold": f"{len(one.held)} of {len(SIX)}", "Seeds": len(one.rows)}
        accuracy = fmean(row["train_accuracy"] for row in one.rows)
        norm = fmean(row["guesses"]["wt"]["covariance_norm"] for row in one.rows)
        rows.append({**one.labels, **numbers, **rest, "Train accuracy": accuracy, "Wᵀ covariance norm": norm})
    return Table("common-settings", "One network for all guesses", rows)


def best_table(tried: Sequence[Setting], count: int = 5) -> Table:
    """The settings in which most numbers hold."""
    return settings_table(sorted(tried, key=lambda one: -len(one.held))[:count])


def counts_table(tried: Sequence[Setting]) -> Table:
    """In how many settings each number holds."""
    kinds: dict[str, Callable[[Setting], bool]] = {
        "All settings": lambda one: True,
        "300 epochs": lambda one: one.epochs == EPOCHS[0],
        "600 epochs": lambda one: one.epochs == EPOCHS[1],
        "Measured as ours": lambda one: one.way == "ours",
        "As the scripts": lambda one: one.way == "scripts",
    }
    rows = []
    for name, entry in SIX.items():
        counted = {title: [name in one.held for one in tried if kind(one)] for title, kind in kinds.items()}
        counts = {title: f"{sum(known)} of {len(known)}" for title, known in counted.items()}
        rows.append({"Number": name, "Paper": number(entry.value, ".2e"), **counts})
    return Table("common-counts", "In how many settings each number holds", rows)


def tried_sentence(tried: Sequence[Setting]) -> str:
    """How many settings explain all six numbers, in words."""
    held = [len(one.held) for one in tried]
    every = held.count(len(SIX))
    explain = f"{every} of them explain" if every else "none of them explains"
    return f"{len(held)} settings tried: {explain} all six numbers, and at most {max(held, default=0)} hold in one."


def sentences(tried: Sequence[Setting]) -> list[str]:
    """What holds in the best setting and how sharply, what longer training moves, and what remains."""
    best = max(tried, key=lambda one: len(one.held))
    off = [100 * abs(best.found[name].mean / SIX[name].value - 1) for name in best.held]
    wide = [100 * (best.found[name].reach or 0) / SIX[name].value for name in best.held]
    missed = " and ".join(f"{name} ({cell(best.found[name], '.2e').text})" for name in SIX if name not in best.held)
    both = {
        epochs: [
            {"Wᵀ bias", "W⊥-bottom bias"} <= one.held
            for one in tried
            if (one.epochs, one.way) == (epochs, "ours") and one.trained != "backprop"
        ]
        for epochs in EPOCHS
    }
    name, entry = next((name, entry) for name, entry in SIX.items() if (entry.method, entry.quantity) == BOTTOM)
    ways = {way: [one for one in tried if one.way == way] for way in WAYS}
    means = {way: [one.found[name].mean for one in kind] for way, kind in ways.items()}
    held = {way: sum(name in one.held for one in kind) for way, kind in ways.items()}
    expected = [Summary.of([row["guesses"]["script-bottom"]["variance"] for row in one.rows]) for one in ways["ours"]]
    steady = sum(verdict(entry, ours) == HOLDS for ours in expected)
    return [
        f"{tried_sentence(tried)} With so many tries and wide intervals some numbers hold by chance.",
        f"In the first setting of the table {missed} differs. The others hold, but not sharply: our means are "
        f"{_span(off, '.0f')} % off the paper's numbers, and half an interval is {_span(wide, '.0f')} % of them.",
        "On networks that a guess trained, the biases of Wᵀ and of W⊥-bottom hold together in "
        f"{sum(both[600]) or 'none'} of {len(both[600])} ways of training after 600 epochs, and in "
        f"{sum(both[300]) or 'none'} of {len(both[300])} after 300.",
        f"The variance of W⊥-bottom remains. It depends on which null vectors are taken: with closed units (ours) it "
        f"is {_span(means['ours'], '.2e')} and holds in {held['ours'] or 'none'} of {len(ways['ours'])} settings; with "
        f"those of an SVD and one draw (scripts) it is {_span(means['scripts'], '.2e')} and holds in "
        f"{held['scripts']} of {len(ways['scripts'])}; with their expected variance, whose interval is narrower, in "
        f"{steady}.",
    ]


def _span(values: Sequence[float], form: str) -> str:
    return " to ".join(number(one, form) for one in (min(values), max(values)))
