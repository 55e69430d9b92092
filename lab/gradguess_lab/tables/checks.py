"""Comparisons that a claim of the paper is made of: each is a function from runs to an outcome, by a stated test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gradguess_lab.tables.compare import DIFFERS, HOLDS, NOT_RUN, SINGLE, Summary, within
from gradguess_lab.tables.runs import Run, overlap_of, select
from gradguess_lab.tables.sides import (
    Check,
    Outcome,
    Side,
    fewest,
    gaps,
    named,
    show,
    show_interval,
    shown_number,
    weakest,
)
from gradguess_lab.tables.welch import difference, mean_of


def ascending(*sides: Side, name: str = "") -> Check:
    """Each side is larger than the one before it, by a one-sided Welch test."""

    def check(runs: Sequence[Run]) -> Outcome:
        known = [summary for side in sides if (summary := side.summary(runs)) is not None]
        if len(known) < 2:
            return Outcome(NOT_RUN)
        verdicts = [_exceeds(a, b) for a, b in pairwise(known)]
        shown = named(name, " < ".join(show(summary) for summary in known))
        left_out = f" ({len(sides) - len(known)} not run)" if len(known) < len(sides) else ""
        return Outcome(weakest(verdicts), shown + left_out, fewest(known))

    return check


def _exceeds(a: Summary, b: Summary) -> str:
    found = difference(a, b)
    return SINGLE if found is None else found.exceeds()


def agree(one: Side, other: Side, margin: float, name: str = "") -> Check:
    """The two do not differ by a two-sided Welch test, and are equivalent within the margin."""

    def check(runs: Sequence[Run]) -> Outcome:
        a, b = one.summary(runs), other.summary(runs)
        if a is None or b is None:
            return Outcome(NOT_RUN)
        found, sides = difference(b, a), f"{show(a)}, {show(b)}"
        if found is None:
            return Outcome(SINGLE, named(name, sides), fewest([a, b]))
        shown = f"{sides}, difference {show_interval(found)}"
        return Outcome(found.is_zero(margin), named(name, shown), fewest([a, b]))

    return check


def gap_near(low: Side, high: Side, expected: float, rounding: float) -> Check:
    """The paper's gap lies in the prediction interval of ours."""

    def check(runs: Sequence[Run]) -> Outcome:
        a, b = low.summary(runs), high.summary(runs)
        if a is None or b is None:
            return Outcome(NOT_RUN)
        ours = _gap(low, high, runs)
        if ours is None:
            return Outcome(SINGLE, f"gap {shown_number(b.mean - a.mean, signed=True, scale=1.0)}", fewest([a, b]))
        gap, reach = shown_number(ours.mean, signed=True, scale=1.0), shown_number(ours.reach or 0, scale=1.0)
        shown = f"gap {gap}, a single one lies within ± {reach}"
        return Outcome(HOLDS if within(expected, rounding, ours) else DIFFERS, shown, ours.n)

    return check


def _gap(low: Side, high: Side, runs: Sequence[Run]) -> Summary | None:
    """The gap of single runs: seed by seed where both have the same seeds, else as of independent runs."""
    paired = gaps(low, high, runs)
    if paired is not None:
        return Summary.of(paired)
    a, b = low.summary(runs), high.summary(runs)
    if a is None or b is None or a.sd is None or b.sd is None:
        return None
    return Summary(b.mean - a.mean, (a.sd**2 + b.sd**2) ** 0.5, min(a.n, b.n))


def at_least(layers: Sequence[int], width: int, k: int, share: float, name: str = "") -> Check:
    """The k leading directions hold more than this share of the gradient's norm in every layer, by one-sided tests."""

    def check(runs: Sequence[Run]) -> Outcome:
        for variant in select(runs, "wperp", width, k=10):
            curves = [[overlap_of(run, layer) for run in variant.runs] for layer in layers]
            values = [[curve[k - 1] for curve in layer if len(curve) >= k] for layer in curves]
            means = [summary for found in values if (summary := Summary.of(found))]
            if len(means) == len(layers):
                shown = ", ".join(f"layer {n}: {show(mean)}" for n, mean in zip(layers, means, strict=True))
                return Outcome(weakest(_above(mean, share) for mean in means), named(name, shown), fewest(means))
        return Outcome(NOT_RUN)

    return check


def _above(ours: Summary, share: float) -> str:
    found = mean_of(ours)
    return SINGLE if found is None else found.exceeds(share)
