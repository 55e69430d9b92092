"""Comparisons that a claim of the paper is made of: each is a function from runs to an outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradguess.experiments.paper_numbers import LAYER_SITES
from gradguess.experiments.tables.compare import DIFFERS, HOLDS, NOT_RUN, UNCLEAR, Summary
from gradguess.experiments.tables.runs import Run, Variant, method_label, select

__all__ = [
    "Check",
    "Outcome",
    "Side",
    "agree",
    "at_least",
    "beats",
    "below",
    "every",
    "gap_grows",
    "gap_near",
]


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

    def summary(self, runs: Sequence[Run]) -> Summary | None:
        found = self.variants(runs)
        return self.of(found[0]) if found else None

    def of(self, variant: Variant) -> Summary | None:
        return Summary.of(variant.values(self.quantity, self.layer))

    @property
    def name(self) -> str:
        return method_label(self.method) + (f" (k = {self.k})" if self.k is not None else "")


@dataclass(frozen=True)
class Outcome:
    verdict: str
    ours: str = ""


Check = Callable[[Sequence[Run]], Outcome]


def beats(winner: Side, loser: Side, same_device: bool = False) -> Check:
    """The first side is larger, by more than the noise. Times are compared on one device only."""

    def check(runs: Sequence[Run]) -> Outcome:
        pair = _pair(winner, loser, runs, same_device)
        if pair is None:
            return Outcome(NOT_RUN)
        high, low = pair
        shown = f"{winner.name} {_show(high)} against {loser.name} {_show(low)}"
        return Outcome(_sign(high.mean - low.mean, _noise(winner.quantity, high, low)), shown)

    return check


def below(smaller: Side, larger: Side, same_device: bool = False) -> Check:
    """The first side is smaller, by more than the noise."""
    check = beats(larger, smaller, same_device)

    def swapped(runs: Sequence[Run]) -> Outcome:
        outcome = check(runs)
        first, _, second = outcome.ours.partition(" against ")
        return Outcome(outcome.verdict, f"{second} against {first}" if second else "")

    return swapped


def agree(one: Side, other: Side, within: float) -> Check:
    """The two differ by no more than `within`, a stated tolerance, and twice their standard error."""

    def check(runs: Sequence[Run]) -> Outcome:
        a, b = one.summary(runs), other.summary(runs)
        if a is None or b is None:
            return Outcome(NOT_RUN)
        allowed = within + (2 * _standard_error(a, b) if a.sd is not None and b.sd is not None else 0.0)
        shown = f"{one.name} {_show(a)}, {other.name} {_show(b)}; allowed {allowed:.3f} apart"
        return Outcome(HOLDS if abs(a.mean - b.mean) <= allowed else DIFFERS, shown)

    return check


def gap_near(winner: Side, loser: Side, expected: float, within: float = 0.03) -> Check:
    """The difference of the two is the one the paper reports, to a stated tolerance."""

    def check(runs: Sequence[Run]) -> Outcome:
        gap = _gap(winner, loser, runs)
        if gap is None:
            return Outcome(NOT_RUN)
        shown = f"gap {gap[0]:+.3f} ± {gap[1]:.3f}".replace("-", "−")
        return Outcome(HOLDS if abs(gap[0] - expected) <= within + 2 * gap[1] else DIFFERS, shown)

    return check


def gap_grows(winner: Callable[[int], Side], loser: Callable[[int], Side], widths: Sequence[int]) -> Check:
    """The gap at the last of the widths that were run exceeds the gap at the first."""

    def check(runs: Sequence[Run]) -> Outcome:
        gaps = {width: _gap(winner(width), loser(width), runs) for width in widths}
        known = {width: gap for width, gap in gaps.items() if gap is not None}
        if len(known) < 2:
            return Outcome(NOT_RUN)
        first, last = known[min(known)], known[max(known)]
        shown = ", ".join(f"{width}: {gap[0]:+.3f}".replace("-", "−") for width, gap in known.items())
        noise = 2 * math.hypot(first[1], last[1]) or 0.01
        return Outcome(_sign(last[0] - first[0], noise), shown)

    return check


def at_least(layers: Sequence[int], width: int, k: int, share: float) -> Check:
    """The k leading directions hold at least this share of the gradient's norm, in every layer named."""

    def check(runs: Sequence[Run]) -> Outcome:
        found = {layer: _overlap_at(runs, width, layer, k) for layer in layers}
        if any(overlap is None for overlap in found.values()):
            return Outcome(NOT_RUN)
        shown = ", ".join(f"layer {layer}: {overlap:.3f}" for layer, overlap in found.items())
        enough = all((overlap or 0.0) >= share for overlap in found.values())
        return Outcome(HOLDS if enough else DIFFERS, shown)

    return check


def every(*checks: Check) -> Check:
    """Several comparisons at once: as strong as the weakest of those that were run."""

    def check(runs: Sequence[Run]) -> Outcome:
        outcomes = [one(runs) for one in checks]
        known = [outcome for outcome in outcomes if outcome.verdict != NOT_RUN]
        if not known:
            return Outcome(NOT_RUN)
        order = (DIFFERS, UNCLEAR, HOLDS)
        weakest = min((outcome.verdict for outcome in known), key=order.index)
        partial = f" ({len(known)} of {len(outcomes)} comparisons run)" if len(known) < len(outcomes) else ""
        return Outcome(weakest, "; ".join(outcome.ours for outcome in known) + partial)

    return check


def _gap(winner: Side, loser: Side, runs: Sequence[Run]) -> tuple[float, float] | None:
    high, low = winner.summary(runs), loser.summary(runs)
    if high is None or low is None:
        return None
    return high.mean - low.mean, _standard_error(high, low)


def _overlap_at(runs: Sequence[Run], width: int, layer: int, k: int) -> float | None:
    for variant in select(runs, "wperp", width, k=10):
        found = [value for run in variant.runs if (value := _overlap_of(run, layer, k)) is not None]
        if found:
            return sum(found) / len(found)
    return None


def _overlap_of(run: Run, layer: int, k: int) -> float | None:
    if not run.diagnostics:
        return None
    last = max(run.diagnostics, key=lambda entry: entry["epoch"])
    curve = last["sites"].get(LAYER_SITES[layer], {}).get("overlap") or ()
    return curve[k - 1] if len(curve) >= k else None


def _pair(one: Side, other: Side, runs: Sequence[Run], same_device: bool) -> tuple[Summary, Summary] | None:
    """Both sides, by the variants with most seeds; on one kind of device if that is asked for."""
    for a in one.variants(runs):
        for b in other.variants(runs):
            first, second = one.of(a), other.of(b)
            if first and second and (a.device == b.device or not same_device):
                return first, second
    return None


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


def _show(ours: Summary) -> str:
    form = ".3f" if 1e-2 <= abs(ours.mean) < 100 else ".3g"
    spread = "" if ours.sd is None else f" ± {ours.sd:{form}}"
    return f"{ours.mean:{form}}{spread} (n = {ours.n})".replace("-", "−")
