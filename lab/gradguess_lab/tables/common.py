"""The common-network experiment: which settings explain the paper's variances and biases at width 128.

A setting is a way of training, a use of biases, a number of epochs and a way of measuring (`WAYS`). It explains the six
numbers, `SIX`, only if all of them lie in their intervals at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import pandas as pd

from gradguess_lab.common_network import BIASES, EPOCHS, TRAINED
from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import BIAS_VARIANCE, Published
from gradguess_lab.tables.table import Row, Table, cell, number, table
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
BOTTOM = "W⊥-bottom variance"


def value(row: Mapping[str, Any], entry: Published, way: str) -> float:
    """One of the six numbers on one network."""
    names = {"wperp-bottom": "script-bottom", "variance": "drawn"} if way == "scripts" else {}
    return row["guesses"][names.get(entry.method, entry.method)][names.get(entry.quantity, entry.quantity)]


def settings(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A line for each setting with networks that were measured: the six numbers of its networks, and which hold."""
    lines = []
    for epochs, biases, trained, way in product(EPOCHS, BIASES, TRAINED, WAYS):
        key = {"trained": trained, "biases": biases, "epochs": epochs}
        if chosen := [row for row in rows if key.items() <= row.items()]:
            found = {name: Summary.of([value(row, entry, way) for row in chosen]) for name, entry in SIX.items()}
            held = {name for name, ours in found.items() if verdict(SIX[name], ours) == HOLDS}
            lines.append({**key, "way": way, **found, "held": held, "count": len(held), "networks": chosen})
    return pd.DataFrame(lines, columns=["trained", "biases", "epochs", "way", *SIX, "held", "count", "networks"])


@table("common-settings", "One network for all guesses")
def settings_table(tried: pd.DataFrame) -> Iterator[Row]:
    """The six numbers of each setting below the paper's."""
    paper = {"Trained by": "the paper", **dict.fromkeys(("Biases", "Epochs", "Measured as"), "")}
    paper |= {name: number(entry.value, ".2e") for name, entry in SIX.items()}
    yield {**paper, "Hold": "", "Seeds": "", "Train accuracy": "", "Wᵀ covariance norm": NORM.printed}
    for one in tried.to_dict("records"):
        label = "W⊥-bottom, reduced SVD" if one["trained"] == "reduced" else method_label(one["trained"])
        yield (
            {"Trained by": label, "Biases": one["biases"], "Epochs": one["epochs"], "Measured as": one["way"]}
            | {name: cell(one[name], ".2e", verdict(entry, one[name])) for name, entry in SIX.items()}
            | {"Hold": f"{one['count']} of {len(SIX)}", "Seeds": len(one["networks"])}
            | {"Train accuracy": fmean(row["train_accuracy"] for row in one["networks"])}
            | {"Wᵀ covariance norm": fmean(row["guesses"]["wt"]["covariance_norm"] for row in one["networks"])}
        )


def best_table(tried: pd.DataFrame, count: int = 5) -> Table:
    """The settings in which most numbers hold."""
    return settings_table(tried.sort_values("count", ascending=False, kind="stable").head(count))


@table("common-counts", "In how many settings each number holds")
def counts_table(tried: pd.DataFrame) -> Iterator[Row]:
    """In how many settings each number holds."""
    kinds = {"All settings": tried}
    kinds |= {f"{epochs} epochs": tried[tried["epochs"] == epochs] for epochs in EPOCHS}
    kinds |= {
        f"{title} {way}": tried[tried["way"] == way] for title, way in (("Measured as", "ours"), ("As the", WAYS[1]))
    }
    for name, entry in SIX.items():
        counts = {title: f"{_holding(part, name)} of {len(part)}" for title, part in kinds.items()}
        yield {"Number": name, "Paper": number(entry.value, ".2e"), **counts}


def tried_sentence(tried: pd.DataFrame) -> str:
    """How many settings explain all six numbers, in words."""
    every, most = _holding(tried, *SIX), max(tried["count"], default=0)
    explain = f"{every} of them explain" if every else "none of them explains"
    return f"{len(tried)} settings tried: {explain} all six numbers, and at most {most} hold in one."


def sentences(tried: pd.DataFrame) -> list[str]:
    """What holds in the best setting and how sharply, what longer training moves, and what remains."""
    best = tried.loc[tried["count"].idxmax()]
    off = [100 * abs(best[name].mean / SIX[name].value - 1) for name in best["held"]]
    wide = [100 * (best[name].reach or 0) / SIX[name].value for name in best["held"]]
    missed = " and ".join(f"{name} ({cell(best[name], '.2e').text})" for name in SIX if name not in best["held"])
    ours, scripts = (tried[tried["way"] == way] for way in WAYS)
    short, long = (ours[(ours["epochs"] == epochs) & (ours["trained"] != "backprop")] for epochs in EPOCHS)
    both = {
        kind: _holding(part, "Wᵀ bias", "W⊥-bottom bias") or "none" for kind, part in (("short", short), ("long", long))
    }
    drawn = ((row["guesses"]["script-bottom"]["variance"] for row in networks) for networks in ours["networks"])
    steady = sum(verdict(SIX[BOTTOM], Summary.of(list(values))) == HOLDS for values in drawn)
    return [
        f"{tried_sentence(tried)} With so many tries and wide intervals some numbers hold by chance.",
        f"In the first setting of the table {missed} differs. The others hold, but not sharply: our means are "
        f"{_span(off, '.0f')} % off the paper's numbers, and half an interval is {_span(wide, '.0f')} % of them.",
        "On networks that a guess trained, the biases of Wᵀ and of W⊥-bottom hold together in "
        f"{both['long']} of {len(long)} ways of training after 600 epochs, and in {both['short']} of {len(short)} "
        "after 300.",
        f"The variance of W⊥-bottom remains. It depends on which null vectors are taken: with closed units (ours) it "
        f"is {_span([one.mean for one in ours[BOTTOM]], '.2e')} and holds in {_holding(ours, BOTTOM) or 'none'} of "
        f"{len(ours)} settings; with those of an SVD and one draw (scripts) it is "
        f"{_span([one.mean for one in scripts[BOTTOM]], '.2e')} and holds in {_holding(scripts, BOTTOM)} of "
        f"{len(scripts)}; with their expected variance, whose interval is narrower, in {steady}.",
    ]


def _holding(tried: pd.DataFrame, *names: str) -> int:
    """In how many settings all of these numbers hold."""
    return sum(set(names) <= held for held in tried["held"])


def _span(values: Sequence[float], form: str) -> str:
    return " to ".join(number(one, form) for one in (min(values), max(values)))
