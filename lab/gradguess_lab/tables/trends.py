"""Claims about what happens as the width grows: functions from runs to an outcome, by a stated test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from gradguess_lab.tables.compare import DIFFERS, HOLDS, NOT_RUN, SINGLE, UNCLEAR, Summary
from gradguess_lab.tables.runs import Run, overlap_of, select
from gradguess_lab.tables.sides import Check, Outcome, Side, gaps, named, show_interval, shown_number, weakest
from gradguess_lab.tables.welch import Estimate, difference, slope

_OPPOSITE = {HOLDS: DIFFERS, DIFFERS: HOLDS, UNCLEAR: UNCLEAR}
_WORDS = {HOLDS: "grows", UNCLEAR: "unclear", DIFFERS: "shrinks"}


def gap_grows(low: Callable[[int], Side], high: Callable[[int], Side], widths: Sequence[int]) -> Check:
    """The gap grows from each width to the next, and with the logarithm of the width: one-sided tests."""

    def check(runs: Sequence[Run]) -> Outcome:
        sides = {width: (low(width), high(width)) for width in widths}
        present = [width for width, pair in sides.items() if all(side.by_seed(runs) for side in pair)]
        found = {width: seeds for width in present if (seeds := gaps(*sides[width], runs))}
        if len(found) < 2:
            return Outcome(SINGLE if len(present) > 1 else NOT_RUN)
        summaries = {width: summary for width, seeds in found.items() if (summary := Summary.of(seeds))}
        rise = slope([(math.log2(width), gap) for width, seeds in found.items() for gap in seeds])
        steps = {(a, b): difference(summaries[a], summaries[b]) for a, b in pairwise(summaries)}
        verdicts = {pair: step.exceeds() for pair, step in steps.items() if step}
        shown = ", ".join(
            f"{width}: {shown_number(gap.mean, signed=True, scale=1.0)}" for width, gap in summaries.items()
        )
        shown += "; " + ", ".join(f"{a} → {b} {_WORDS[verdict]}" for (a, b), verdict in verdicts.items())
        shown += f"; per doubling {show_interval(rise)}" if rise else ""
        overall = [rise.exceeds()] if rise else []
        return Outcome(weakest([*verdicts.values(), *overall]), shown, min(s.n for s in summaries.values()))

    return check


def flat(side: Callable[[int], Side], widths: Sequence[int], margin: float) -> Check:
    """The exponent of the width in a quantity is zero within the margin: `quantity ~ width^a`, |a| < margin."""

    def check(runs: Sequence[Run]) -> Outcome:
        found = {width: values for width in widths if (values := list(side(width).by_seed(runs).values()))}
        return _exponent(found, lambda a: a.is_small(margin), widths)

    return check


def slower_than_width(layer: int, widths: Sequence[int], share: float, below: float) -> Check:
    """The number of directions that hold this share of the gradient grows as `width^a` with `a < below`."""

    def check(runs: Sequence[Run]) -> Outcome:
        found = {width: values for width in widths if (values := _needed(runs, width, layer, share))}
        outcome = _exponent(found, lambda a: _OPPOSITE[a.exceeds(below)], widths)
        return (
            Outcome(outcome.verdict, named(f"layer {layer}", outcome.ours), outcome.seeds) if outcome.ours else outcome
        )

    return check


def _needed(runs: Sequence[Run], width: int, layer: int, share: float) -> list[float]:
    """The least k whose leading directions hold this share of the gradient's norm, in every diagnosed run."""
    for variant in select(runs, "wperp", width, k=10):
        curves = [curve for run in variant.runs if (curve := overlap_of(run, layer))]
        if curves:
            return [next((k for k, part in enumerate(curve, 1) if part >= share), len(curve)) for curve in curves]
    return []


def _exponent(found: dict[int, list[float]], judge: Callable[[Estimate], str], widths: Sequence[int]) -> Outcome:
    """The exponent of the width by least squares over all runs, and what is said of it."""
    if len(found) < 2:
        return Outcome(NOT_RUN)
    points = [(math.log2(width), math.log2(value)) for width, values in found.items() for value in values if value > 0]
    rise = slope(points)
    means = {width: sum(values) / len(values) for width, values in found.items()}
    shown = ", ".join(f"{width}: {shown_number(mean)}" for width, mean in means.items())
    shown += f" ({len(widths) - len(found)} not run)" if len(found) < len(widths) else ""
    seeds = min(len(values) for values in found.values())
    if rise is None or seeds < 2:
        return Outcome(SINGLE, shown, seeds)
    return Outcome(judge(rise), f"{shown}; exponent {show_interval(rise)}", seeds)
