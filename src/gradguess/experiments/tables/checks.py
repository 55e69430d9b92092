"""Comparisons that a claim of the paper is made of: each is a function from runs to an outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradguess.experiments.tables.compare import DIFFERS, HOLDS, NOT_RUN, UNCLEAR, Summary
from gradguess.experiments.tables.runs import Run, Variant, overlap_of, select

_ORDER = (DIFFERS, UNCLEAR, HOLDS)  # the weakest first


@dataclass(frozen=True)
class Side:
    """One quantity of one experiment in the paper's setting."""

    method: str
    width: int
    quantity: str = "train_accuracy"
    k: int | str | None = None
    layer: int | None = None
    solver: str | None = None

    def variants(self, runs: Sequence[Run]) -> list[Variant]:
        """The ways it was computed that measured the quantity, the one with most seeds first."""
        found = select(runs, self.method, self.width, self.k, self.solver)
        return [variant for variant in found if variant.values(self.quantity, self.layer)]

    def summary(self, runs: Sequence[Run], device: str | None = None) -> Summary | None:
        found = (v for v in self.variants(runs) if device is None or v.device == device)
        first = next(found, None)
        return Summary.of(first.values(self.quantity, self.layer)) if first else None


@dataclass(frozen=True)
class Outcome:
    """A verdict, the numbers it rests on, and the seeds of the side that has fewest."""

    verdict: str
    ours: str = ""
    seeds: int | None = None


Check = Callable[[Sequence[Run]], Outcome]


def ascending(*sides: Side, name: str = "", same_device: bool = False) -> Check:
    """Each side is larger than the one before it, by more than the noise. Times are compared on one device."""

    def check(runs: Sequence[Run]) -> Outcome:
        found = _on_one_device(sides, runs) if same_device else [side.summary(runs) for side in sides]
        known = [summary for summary in found if summary is not None]
        if len(known) < 2:
            return Outcome(NOT_RUN)
        verdicts = [_sign(b.mean - a.mean, _noise(sides[0].quantity, a, b)) for a, b in pairwise(known)]
        shown = _named(name, " < ".join(_show(summary) for summary in known))
        left_out = f" ({len(sides) - len(known)} not run)" if len(known) < len(sides) else ""
        return Outcome(min(verdicts, key=_ORDER.index), shown + left_out, _fewest(known))

    return check


def agree(one: Side, other: Side, within: float, name: str = "") -> Check:
    """The two differ by no more than a stated tolerance and twice their standard error."""

    def check(runs: Sequence[Run]) -> Outcome:
        a, b = one.summary(runs), other.summary(runs)
        if a is None or b is None:
            return Outcome(NOT_RUN)
        allowed = within + 2 * _standard_error(a, b)
        verdict = HOLDS if abs(a.mean - b.mean) <= allowed else DIFFERS
        return Outcome(verdict, _named(name, f"{_show(a)}, {_show(b)}"), _fewest([a, b]))

    return check


def gap_near(low: Side, high: Side, expected: float, within: float = 0.03) -> Check:
    """The difference of the two is the one that the paper reports, to a stated tolerance."""

    def check(runs: Sequence[Run]) -> Outcome:
        a, b = low.summary(runs), high.summary(runs)
        if a is None or b is None:
            return Outcome(NOT_RUN)
        gap, error = b.mean - a.mean, _standard_error(a, b)
        shown = f"gap {_signed(gap)}" + (f", standard error {error:.3f}" if error else "")
        verdict = HOLDS if abs(gap - expected) <= within + 2 * error else DIFFERS
        return Outcome(verdict, shown, _fewest([a, b]))

    return check


def gap_grows(low: Callable[[int], Side], high: Callable[[int], Side], widths: Sequence[int]) -> Check:
    """The gap at the largest of the widths that were run exceeds the gap at the smallest."""

    def check(runs: Sequence[Run]) -> Outcome:
        pairs = {width: (low(width).summary(runs), high(width).summary(runs)) for width in widths}
        known = {width: (a, b) for width, (a, b) in pairs.items() if a and b}
        if len(known) < 2:
            return Outcome(NOT_RUN)
        gaps = {width: b.mean - a.mean for width, (a, b) in known.items()}
        (a, b), (c, d) = known[min(known)], known[max(known)]
        noise = 2 * math.hypot(_standard_error(a, b), _standard_error(c, d)) or 0.01
        shown = ", ".join(f"{width}: {_signed(gap)}" for width, gap in gaps.items())
        return Outcome(_sign(gaps[max(gaps)] - gaps[min(gaps)], noise), shown, _fewest([a, b, c, d]))

    return check


def at_least(layers: Sequence[int], width: int, k: int, share: float, name: str = "") -> Check:
    """The k leading directions hold at least this share of the gradient's norm, in every layer named."""

    def check(runs: Sequence[Run]) -> Outcome:
        for variant in select(runs, "wperp", width, k=10):
            curves = [[overlap_of(run, layer) for run in variant.runs] for layer in layers]
            values = [[curve[k - 1] for curve in layer if len(curve) >= k] for layer in curves]
            means = [sum(found) / len(found) for found in values if found]
            if len(means) == len(layers):
                shown = ", ".join(f"layer {n}: {mean:.3f}" for n, mean in zip(layers, means, strict=True))
                verdict = HOLDS if min(means) >= share else DIFFERS
                return Outcome(verdict, _named(name, shown), min(len(found) for found in values))
        return Outcome(NOT_RUN)

    return check


def every(*checks: Check) -> Check:
    """Several comparisons at once: as strong as the weakest of those that were run."""

    def check(runs: Sequence[Run]) -> Outcome:
        outcomes = [one(runs) for one in checks]
        known = [outcome for outcome in outcomes if outcome.verdict != NOT_RUN]
        if not known:
            return Outcome(NOT_RUN)
        weakest = min((outcome.verdict for outcome in known), key=_ORDER.index)
        shown = "; ".join(outcome.ours for outcome in known)
        partial = f" ({len(outcomes) - len(known)} not run)" if len(known) < len(outcomes) else ""
        return Outcome(weakest, shown + partial, min(outcome.seeds or 0 for outcome in known))

    return check


def _on_one_device(sides: Sequence[Side], runs: Sequence[Run]) -> list[Summary | None]:
    """The sides on the first kind of device that ran all of them."""
    for device in dict.fromkeys(variant.device for variant in sides[0].variants(runs)):
        found = [side.summary(runs, device) for side in sides]
        if all(found):
            return found
    return []


def _noise(quantity: str, a: Summary, b: Summary) -> float:
    """What a difference has to exceed: two standard errors, or with single seeds a stated bar."""
    if a.sd is None or b.sd is None:
        return 0.01 if quantity.endswith("accuracy") else 0.05 * min(abs(a.mean), abs(b.mean))
    return 2 * _standard_error(a, b)


def _standard_error(a: Summary, b: Summary) -> float:
    return math.sqrt((a.sd or 0.0) ** 2 / a.n + (b.sd or 0.0) ** 2 / b.n)


def _sign(difference: float, noise: float) -> str:
    if difference > noise:
        return HOLDS
    return UNCLEAR if abs(difference) <= noise else DIFFERS


def _fewest(summaries: Iterable[Summary]) -> int:
    return min(summary.n for summary in summaries)


def _show(ours: Summary) -> str:
    if ours.mean and not 1e-2 <= abs(ours.mean) < 100:
        return f"{ours.mean:.2e}".replace("e-0", "e-").replace("-", "−")
    return f"{ours.mean:.3f}" + ("" if ours.sd is None else f" ± {ours.sd:.3f}")


def _signed(gap: float) -> str:
    return f"{gap:+.3f}".replace("-", "−")


def _named(name: str, shown: str) -> str:
    return f"{name}: {shown}" if name else shown
