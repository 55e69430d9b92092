"""What the paper says in words, checked on our numbers: `CLAIMS` lists it in the paper's order.

A check is a function from runs to an outcome, by a stated test. A side of it is named in words, such as "wperp 128 10
variance": a method, a width, then its `k`, the threshold of W⊥-NS and the quantity of a layer, as far as they are
needed; without the latter it is the training accuracy. "{}" stands for a width that changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.runs import Group, Run, select
from gradguess_lab.tables.table import Row, cell, number, table
from gradguess_lab.tables.verdicts import (
    DIFFERS,
    HOLDS,
    NOT_RUN,
    SINGLE,
    UNCLEAR,
    Estimate,
    Summary,
    difference,
    slope,
    within,
)


class NotRun(Exception):
    """What a comparison needs is not among the runs."""


@dataclass(frozen=True)
class Outcome:
    """A verdict, the numbers it rests on, and the seeds of the side that has fewest."""

    verdict: str
    ours: str = ""
    seeds: int | None = None


Runs = Sequence[Run]
Check = Callable[[Runs], Outcome]
P = ParamSpec("P")


def by_seed(runs: Runs, side: str) -> dict[int, float]:
    """What a side measured, under its seed, computed in the main way of those that measured it.

    Bias and the like are those of layer 1, the one layer that the paper names.
    """
    method, width, *words = side.split()
    k, quantity, layer, wanted = None, "train_accuracy", None, {}
    for word in words:
        if word == "rank" or word.isdecimal():
            k = word if word == "rank" else int(word)
        elif word in ("nearest", "placed"):
            wanted = {"threshold": word}
        else:
            quantity, layer = word, 1
    for group in select(runs, method, int(width), k, **wanted):
        if found := group.by_seed(quantity, layer):
            return found
    raise NotRun


def summed(values: Iterable[float]) -> Summary:
    found = Summary.of(list(values))
    assert found is not None
    return found


# --- checks ---


def check(test: Callable[Concatenate[Runs, P], Outcome]) -> Callable[P, Check]:
    """A test of the runs by what it is told becomes a function of the latter, which returns the check."""
    return lambda *told, **more: lambda runs: test(runs, *told, **more)


def weakest(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=(DIFFERS, SINGLE, UNCLEAR, HOLDS).index)


@check
def ascending(runs: Runs, *sides: str) -> Outcome:
    """Each side is larger than the one before it, by a one-sided Welch test."""
    known = [summed(by_seed(runs, side).values()) for side in sides]
    verdicts = [difference(a, b).exceeds() for a, b in pairwise(known)]
    return Outcome(weakest(verdicts), " < ".join(map(show, known)), min(one.n for one in known))


@check
def agree(runs: Runs, one: str, other: str, margin: float) -> Outcome:
    """The two do not differ by a two-sided Welch test, and are equivalent within the margin."""
    a, b = (summed(by_seed(runs, side).values()) for side in (one, other))
    found = difference(b, a)
    return Outcome(found.is_zero(margin), f"{show(a)}, {show(b)}, difference {interval(found)}", min(a.n, b.n))


@check
def gap_near(runs: Runs, low: str, high: str, expected: float, rounding: float) -> Outcome:
    """The paper's gap lies in the prediction interval of ours, seed by seed where both sides have the same seeds."""
    a, b = by_seed(runs, low), by_seed(runs, high)
    if a.keys() == b.keys():
        ours = summed(_gaps(a, b))
    else:
        one, two = summed(a.values()), summed(b.values())
        sd = None if one.sd is None or two.sd is None else math.hypot(one.sd, two.sd)
        ours = Summary(two.mean - one.mean, sd, min(one.n, two.n))
    holds = within(expected, rounding, ours)
    shown = f"gap {number(ours.mean, '+.3f')}"
    shown += f", a single one lies within ± {number(ours.reach)}" if ours.reach is not None else ""
    return Outcome(SINGLE if holds is None else HOLDS if holds else DIFFERS, shown, ours.n)


@check
def gap_grows(runs: Runs, low: str, high: str) -> Outcome:
    """The gap grows from each width to the next, and with the logarithm of the width: one-sided tests."""
    found = _over_width(lambda width: [by_seed(runs, side.format(width)) for side in (low, high)])
    gaps = {width: _gaps(a, b) for width, (a, b) in found.items() if a.keys() == b.keys() and len(a) > 1}
    if len(gaps) < 2:
        return Outcome(SINGLE)
    rise = slope([(math.log2(width), gap) for width, seeds in gaps.items() for gap in seeds])
    means = {width: summed(seeds) for width, seeds in gaps.items()}
    steps = {f"{a} → {b}": difference(means[a], means[b]).exceeds() for a, b in pairwise(means)}
    words = {HOLDS: "grows", UNCLEAR: "unclear", DIFFERS: "shrinks"}
    parts = [", ".join(f"{width}: {number(gap.mean, '+.3f')}" for width, gap in means.items())]
    parts += [", ".join(f"{step} {words[said]}" for step, said in steps.items()), f"per doubling {interval(rise)}"]
    return Outcome(weakest([*steps.values(), rise.exceeds()]), "; ".join(parts), min(one.n for one in means.values()))


@check
def flat(runs: Runs, side: str, margin: float) -> Outcome:
    """The exponent of the width in a quantity is zero within the margin: `quantity ~ width^a`, |a| < margin."""
    found = _over_width(lambda width: list(by_seed(runs, side.format(width)).values()))
    return _exponent(found, lambda a: a.is_small(margin))


@check
def slower_than_width(runs: Runs, layer: int, share: float, below: float) -> Outcome:
    """The number of directions that hold this share of the gradient grows as `width^a` with `a < below`."""
    opposite = {HOLDS: DIFFERS, DIFFERS: HOLDS}

    def needed(width: int) -> list[float]:
        curves = _diagnosed(runs, width, (layer,)).overlaps(layer)
        return [next((k for k, part in enumerate(curve, 1) if part >= share), len(curve)) for curve in curves]

    return _exponent(_over_width(needed), lambda a: opposite.get(a.exceeds(below), UNCLEAR))


@check
def at_least(runs: Runs, layers: Sequence[int], width: int, share: float, k: int = 10) -> Outcome:
    """The k leading directions hold more than this share of the gradient's norm in every layer, by one-sided tests."""
    group = _diagnosed(runs, width, layers)
    means = {layer: summed(curve[k - 1] for curve in group.overlaps(layer)) for layer in layers}
    shown = ", ".join(f"layer {layer}: {show(mean)}" for layer, mean in means.items())
    verdicts = [difference(Summary(share, 0.0, 2), mean).exceeds() for mean in means.values()]
    return Outcome(weakest(verdicts), shown, min(mean.n for mean in means.values()))


@check
def every(runs: Runs, checks: Mapping[Any, Check]) -> Outcome:
    """Several named comparisons at once: as strong as the weakest of those that were run."""
    found = {name: outcome(one, runs) for name, one in checks.items()}
    known = {name: one for name, one in found.items() if one.verdict != NOT_RUN}
    if not known:
        raise NotRun
    shown = "; ".join(f"{name}: {one.ours}" for name, one in known.items())
    return Outcome(weakest(one.verdict for one in known.values()), shown, min(o.seeds or 0 for o in known.values()))


def outcome(one: Check, runs: Runs) -> Outcome:
    """What a check finds, also where nothing was run."""
    try:
        return one(runs)
    except NotRun:
        return Outcome(NOT_RUN)


def _diagnosed(runs: Runs, width: int, layers: Sequence[int]) -> Group:
    """The runs of W⊥, k = 10, of which there are overlaps in all of these layers."""
    for group in select(runs, "wperp", width, k=10):
        if all(group.overlaps(layer) for layer in layers):
            return group
    raise NotRun


def _over_width(measured: Callable[[int], Any]) -> dict[int, Any]:
    """What was measured at each of the paper's widths, of which there must be two."""
    found = {}
    for width in WIDTHS:
        with suppress(NotRun):
            found[width] = measured(width)
    if len(found) < 2:
        raise NotRun
    return found


def _gaps(low: dict[int, float], high: dict[int, float]) -> list[float]:
    return [high[seed] - low[seed] for seed in sorted(low)]


def _exponent(found: dict[int, list[float]], judge: Callable[[Estimate], str]) -> Outcome:
    """The exponent of the width by least squares over all runs, and what is said of it."""
    means = {width: sum(values) / len(values) for width, values in found.items()}
    shown = ", ".join(f"{width}: {number(mean, _form(mean))}" for width, mean in means.items())
    seeds = min(map(len, found.values()))
    if seeds < 2:
        return Outcome(SINGLE, shown, seeds)
    rise = slope([(math.log2(width), math.log2(value)) for width, values in found.items() for value in values])
    return Outcome(judge(rise), f"{shown}; exponent {interval(rise)}", seeds)


# --- numbers in words ---


def _form(value: float) -> str:
    """Three decimals, or three digits where a number of this size needs them."""
    return ".3f" if not value or 1e-2 <= abs(value) < 1000 else ".2e"


def show(ours: Summary) -> str:
    return cell(ours, _form(ours.mean)).text


def interval(found: Estimate) -> str:
    """A difference of accuracies, or an exponent, with its 95 % interval where there is one."""
    value, low, high = (number(part, "+.3f") for part in (found.value, *found.interval()))
    return value if math.isnan(found.error) else f"{value} [{low}, {high}]"


# --- claims ---

_MOSTLY = math.sqrt(0.5)  # of the gradient's norm, which is half of its square

# A sentence of the paper with what the test needs to be told, the numbers that it gives, and the check.
CLAIMS: tuple[tuple[str, str, Check], ...] = (
    ("Accuracy drops sharply at k = 1 (width 128).", "0.275 < 0.324", ascending("wperp 128 1", "wperp 128 10")),
    ("With k = rank, W⊥ is almost identical to Wᵀ (width 128, margin 0.01).", "0.311, 0.312",
     agree("wperp 128 rank", "wt 128", 0.01)),
    ("Small k beats k = rank (width 128).", "k = 10: 0.311 < 0.324; k = 25: 0.311 < 0.323",
     every({f"k = {k}": ascending("wperp 128 rank", f"wperp 128 {k}") for k in (10, 25)})),
    ("Ten directions hold most of the gradient: more than half of its square (width 128).", "figure",
     at_least((1, 2, 3), 128, _MOSTLY)),
    ("Ten directions hold most of the gradient: more than half of its square (width 512).", "figure",
     at_least((1, 2, 3), 512, _MOSTLY)),
    ("Layer 3 has rank 10: ten directions hold its whole gradient (more than 0.999 of its norm).", "rank 10",
     every({width: at_least((3,), width, 0.999) for width in (128, 512)})),
    ("W⊥ has a smaller variance than Wᵀ (width 128).", "1.03e−5 < 1.50e−4",
     ascending("wperp 128 10 variance", "wt 128 variance")),
    ("W⊥ has a smaller bias than Wᵀ (width 128).", "2.86e−5 < 2.75e−4",
     ascending("wperp 128 10 bias", "wt 128 bias")),
    ("W⊥ has a smaller bias than W⊥-bottom (width 128).", "2.86e−5 < 2.83e−4",
     ascending("wperp 128 10 bias", "wperp-bottom 128 10 bias")),
    ("W⊥ is no closer to the identity than Wᵀ or W⊥-bottom in covariance norm (width 128, margin 0.004).",
     "0.085, 0.084; 0.085, 0.085",
     every({"Wᵀ": agree("wperp 128 10 covariance_norm", "wt 128 covariance_norm", 0.004),
            "W⊥-bottom": agree("wperp 128 10 covariance_norm", "wperp-bottom 128 10 covariance_norm", 0.004)})),
    ("Training with W⊥ reaches a smaller gradient than with W⊥-bottom (width 128).", "in words",
     ascending("wperp 128 10 gradient_norm", "wperp-bottom 128 10 gradient_norm")),
    ("At width 64, W⊥ and Wᵀ do not differ (margin 0.01).", "0.268, 0.268", agree("wperp 64 10", "wt 64", 0.01)),
    ("At width 512, W⊥ is almost ten points ahead of Wᵀ.", "gap +0.087",
     gap_near("wt 512", "wperp 512 10", 0.087, rounding=0.001)),
    ("The gap between W⊥ and Wᵀ grows with the width.", "64: +0.000, 128: +0.011, 256: +0.058, 512: +0.087",
     gap_grows("wt {}", "wperp {} 10")),
    ("The variance of W⊥ hardly changes with the width: it goes as width to a power within ± 0.25.",
     "128: 1.03e−5, 256: 6.33e−6 (power −0.70)", flat("wperp {} 10 variance", 0.25)),
    ("The k that holds most of the gradient grows more slowly than the width n: 0.9 of its norm with k ~ n^a, "
     "a < 0.5.", "in words", every({f"layer {layer}": slower_than_width(layer, 0.9, 0.5) for layer in (1, 2)})),
    ("Weight perturbation < activation perturbation < Wᵀ at every width.",
     "64: 0.121 < 0.201 < 0.268 … 512: 0.177 < 0.319 < 0.494",
     every({w: ascending(f"weight {w}", f"activation {w}", f"wt {w}") for w in WIDTHS})),
    ("Backpropagation stays far ahead of every guess.", "64: 0.268 < 0.536 … 512: 0.581 < 1.000",
     every({w: ascending(f"wperp {w} 10", f"backprop {w}") for w in WIDTHS})),
    ("W⊥-NS is as accurate as W⊥ (margin 0.02).", "128: 0.326, 0.324; 512: 0.594, 0.581",
     every({w: agree(f"wperp-ns {w} 10 nearest", f"wperp {w} 10", 0.02) for w in (128, 512)})),
    ("The same with the threshold placed between σ_k and σ_k+1, which the paper does not do (margin 0.02).", "–",
     every({w: agree(f"wperp-ns {w} 10 placed", f"wperp {w} 10", 0.02) for w in (128, 512)})),
    ("W⊥-NS beats Wᵀ in all cases.", "128: 0.312 < 0.326; 512: 0.486 < 0.594",
     every({w: ascending(f"wt {w}", f"wperp-ns {w} 10 nearest") for w in (128, 512)})),
    ("At width 256, Wᴾ is the least accurate and W⊥ the most.", "0.367 < 0.375 < 0.433",
     ascending("wp 256", "wt 256", "wperp 256 10")),
    ("At width 256, W⊥ has the smallest variance and Wᴾ the largest.", "6.33e−6 < 7.04e−5 < 1.75e−4",
     ascending("wperp 256 10 variance", "wt 256 variance", "wp 256 variance")),
    ("At width 256, Wᴾ has the smallest bias and Wᵀ the largest.", "1.35e−8 < 3.63e−5 < 1.68e−4",
     ascending("wp 256 bias", "wperp 256 10 bias", "wt 256 bias")),
)  # fmt: skip


@table(
    "claims",
    "Claims",
    "Accuracies are those of the training set; bias, variance and norms are those of layer 1. W⊥ has each sample's own "
    "subspace where that was run. Brackets hold the 95 % interval of a difference. Seeds: the fewest on any side.",
)
def claims_table(runs: Sequence[Run]) -> Iterator[Row]:
    for says, paper, check in CLAIMS:
        found = outcome(check, runs)
        ours = {"Ours": found.ours or "–", "Verdict": found.verdict, "Seeds": found.seeds}
        yield {"The paper says": says, "Its numbers": paper, **ours}
