"""Comparisons that a claim of the paper is made of: each is a function from runs to an outcome, by a stated test.

A side is named in words, such as "wperp 128 10 variance": a method, a width, then its `k`, the threshold of W⊥-NS and
the quantity of a layer, as far as they are needed; without the latter it is the training accuracy. "{}" stands for a
width that changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.runs import Group, Run, select
from gradguess_lab.tables.table import cell, number
from gradguess_lab.tables.verdicts import (
    DIFFERS,
    HOLDS,
    NOT_RUN,
    SINGLE,
    UNCLEAR,
    Estimate,
    Summary,
    difference,
    mean_of,
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
    verdicts = [mean_of(mean).exceeds(share) for mean in means.values()]
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
