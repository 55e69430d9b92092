"""Comparisons that a claim of the paper is made of: each is a function from runs to an outcome, by a stated test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.runs import Group, Run, measure, select
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


@dataclass(frozen=True)
class Side:
    """One quantity of one experiment in the paper's setting, by the method's definition where that was run."""

    method: str
    width: int
    quantity: str = "train_accuracy"
    k: int | str | None = None
    threshold: str | None = None  # of W⊥-NS

    def by_seed(self, runs: Runs) -> dict[int, float]:
        """The quantity under its seed, computed in the main way of those that measured it.

        Bias and the like are those of layer 1, the one layer that the paper names.
        """
        layer = 1 if self.quantity in {"variance", "bias", "covariance_norm", "gradient_norm"} else None
        settings = {} if self.threshold is None else {"threshold": self.threshold}
        for group in select(runs, self.method, self.width, self.k, **settings):
            found = {run["seed"]: measure(run, self.quantity, layer) for run in group.runs}
            if found := {seed: value for seed, value in found.items() if value is not None}:
                return found
        raise NotRun

    def values(self, runs: Runs) -> list[float]:
        return list(self.by_seed(runs).values())

    def summary(self, runs: Runs) -> Summary:
        return summed(self.values(runs))


def summed(values: Sequence[float]) -> Summary:
    found = Summary.of(values)
    assert found is not None
    return found


# --- checks ---


def check(test: Callable[Concatenate[Runs, P], Outcome]) -> Callable[P, Check]:
    """A test of the runs by what it is told becomes a function of the latter, which returns the check."""
    return lambda *told, **more: lambda runs: test(runs, *told, **more)


def weakest(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=(DIFFERS, SINGLE, UNCLEAR, HOLDS).index)


@check
def ascending(runs: Runs, *sides: Side) -> Outcome:
    """Each side is larger than the one before it, by a one-sided Welch test."""
    known = [side.summary(runs) for side in sides]
    verdicts = [difference(a, b).exceeds() for a, b in pairwise(known)]
    return Outcome(weakest(verdicts), " < ".join(map(show, known)), min(one.n for one in known))


@check
def agree(runs: Runs, one: Side, other: Side, margin: float) -> Outcome:
    """The two do not differ by a two-sided Welch test, and are equivalent within the margin."""
    a, b = one.summary(runs), other.summary(runs)
    found = difference(b, a)
    shown = f"{show(a)}, {show(b)}, difference {show_interval(found)}"
    return Outcome(found.is_zero(margin), shown, min(a.n, b.n))


@check
def gap_near(runs: Runs, low: Side, high: Side, expected: float, rounding: float) -> Outcome:
    """The paper's gap lies in the prediction interval of ours, seed by seed where both sides have the same seeds."""
    a, b = low.by_seed(runs), high.by_seed(runs)
    if a.keys() == b.keys():
        ours = summed(_gaps(a, b))
    else:
        one, two = summed(list(a.values())), summed(list(b.values()))
        sd = None if one.sd is None or two.sd is None else math.hypot(one.sd, two.sd)
        ours = Summary(two.mean - one.mean, sd, min(one.n, two.n))
    holds = within(expected, rounding, ours)
    shown = f"gap {shown_number(ours.mean, '+', 1.0)}"
    shown += f", a single one lies within ± {shown_number(ours.reach, scale=1.0)}" if ours.reach is not None else ""
    return Outcome(SINGLE if holds is None else HOLDS if holds else DIFFERS, shown, ours.n)


@check
def gap_grows(
    runs: Runs, low: Callable[[int], Side], high: Callable[[int], Side], widths: Sequence[int] = WIDTHS
) -> Outcome:
    """The gap grows from each width to the next, and with the logarithm of the width: one-sided tests."""
    found = _by_width(lambda width: (low(width).by_seed(runs), high(width).by_seed(runs)), widths)
    gaps = {width: _gaps(a, b) for width, (a, b) in found.items() if a.keys() == b.keys() and len(a) > 1}
    if len(gaps) < 2:
        return Outcome(SINGLE)
    rise = slope([(math.log2(width), gap) for width, seeds in gaps.items() for gap in seeds])
    means = {width: summed(seeds) for width, seeds in gaps.items()}
    steps = {(a, b): difference(means[a], means[b]).exceeds() for a, b in pairwise(means)}
    words = {HOLDS: "grows", UNCLEAR: "unclear", DIFFERS: "shrinks"}
    shown = ", ".join(f"{width}: {shown_number(gap.mean, '+', 1.0)}" for width, gap in means.items())
    shown += "; " + ", ".join(f"{a} → {b} {words[verdict]}" for (a, b), verdict in steps.items())
    shown += f"; per doubling {show_interval(rise)}"
    return Outcome(weakest([*steps.values(), rise.exceeds()]), shown, min(one.n for one in means.values()))


@check
def flat(runs: Runs, side: Callable[[int], Side], margin: float, widths: Sequence[int] = WIDTHS) -> Outcome:
    """The exponent of the width in a quantity is zero within the margin: `quantity ~ width^a`, |a| < margin."""
    found = _by_width(lambda width: side(width).values(runs), widths)
    return _exponent(found, lambda a: a.is_small(margin))


@check
def slower_than_width(runs: Runs, layer: int, share: float, below: float, widths: Sequence[int] = WIDTHS) -> Outcome:
    """The number of directions that hold this share of the gradient grows as `width^a` with `a < below`."""
    opposite = {HOLDS: DIFFERS, DIFFERS: HOLDS, UNCLEAR: UNCLEAR}

    def needed(width: int) -> list[float]:
        curves = _diagnosed(runs, width, (layer,)).overlaps(layer)
        return [next((k for k, part in enumerate(curve, 1) if part >= share), len(curve)) for curve in curves]

    return _exponent(_by_width(needed, widths), lambda a: opposite[a.exceeds(below)])


@check
def at_least(runs: Runs, layers: Sequence[int], width: int, share: float, k: int = 10) -> Outcome:
    """The k leading directions hold more than this share of the gradient's norm in every layer, by one-sided tests."""
    group = _diagnosed(runs, width, layers)
    means = {layer: summed([curve[k - 1] for curve in group.overlaps(layer)]) for layer in layers}
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


def _by_width(measured: Callable[[int], Any], widths: Sequence[int]) -> dict[int, Any]:
    """What was measured at each width, of which there must be two."""
    found: dict[int, Any] = {}
    for width in widths:
        try:
            found[width] = measured(width)
        except NotRun:
            continue
    if len(found) < 2:
        raise NotRun
    return found


def _gaps(low: dict[int, float], high: dict[int, float]) -> list[float]:
    return [high[seed] - low[seed] for seed in sorted(low)]


def _exponent(found: dict[int, list[float]], judge: Callable[[Estimate], str]) -> Outcome:
    """The exponent of the width by least squares over all runs, and what is said of it."""
    shown = ", ".join(f"{width}: {shown_number(sum(values) / len(values))}" for width, values in found.items())
    seeds = min(map(len, found.values()))
    if seeds < 2:
        return Outcome(SINGLE, shown, seeds)
    rise = slope([(math.log2(width), math.log2(value)) for width, values in found.items() for value in values])
    return Outcome(judge(rise), f"{shown}; exponent {show_interval(rise)}", seeds)


# --- numbers in words ---


def show(ours: Summary) -> str:
    return shown_number(ours.mean) + ("" if ours.sd is None else f" ± {shown_number(ours.sd, scale=ours.mean)}")


def shown_number(value: float, sign: str = "", scale: float | None = None) -> str:
    """Three decimals, or three digits where a number of this scale needs them.

    >>> shown_number(0.3), shown_number(-2.5e-5), shown_number(4e-3, scale=0.3), shown_number(4e-3, "+")
    ('0.300', '−2.50e−5', '0.004', '+4.00e−3')
    """
    size = abs(value if scale is None else scale)
    text = format(value, ".3f" if not size or 1e-2 <= size < 1000 else ".2e")
    sign = sign if float(text) > 0 else ""
    return sign + text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def show_interval(found: Estimate) -> str:
    """A difference of accuracies, or an exponent, with its 95 % interval where there is one."""
    value, low, high = (shown_number(part, "+", 1.0) for part in (found.value, *found.interval()))
    return value if math.isnan(found.error) else f"{value} [{low}, {high}]"
