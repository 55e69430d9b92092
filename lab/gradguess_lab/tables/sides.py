"""The sides of a comparison, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gradguess_lab.tables.compare import DIFFERS, HOLDS, NOT_RUN, SINGLE, UNCLEAR, Summary
from gradguess_lab.tables.runs import Run, Variant, measure, select
from gradguess_lab.tables.welch import Estimate

_ORDER = (DIFFERS, SINGLE, UNCLEAR, HOLDS)  # the weakest first


@dataclass(frozen=True)
class Side:
    """One quantity of one experiment in the paper's setting, by the method's definition where that was run."""

    method: str
    width: int
    quantity: str = "train_accuracy"
    k: int | str | None = None
    layer: int | None = None
    threshold: str | None = None  # of W⊥-NS

    def variant(self, runs: Sequence[Run]) -> Variant | None:
        """The main way it was computed, of those that measured the quantity."""
        options = {} if self.threshold is None else {"threshold": self.threshold}
        found = select(runs, self.method, self.width, self.k, **options)
        return next((variant for variant in found if variant.values(self.quantity, self.layer)), None)

    def by_seed(self, runs: Sequence[Run]) -> dict[object, float]:
        """The quantity in every run that measured it, under its seed."""
        variant = self.variant(runs)
        found = (
            {run.config.get("seed"): measure(run, self.quantity, self.layer) for run in variant.runs} if variant else {}
        )
        return {seed: value for seed, value in found.items() if value is not None}

    def summary(self, runs: Sequence[Run]) -> Summary | None:
        return Summary.of(list(self.by_seed(runs).values()))


@dataclass(frozen=True)
class Outcome:
    """A verdict, the numbers it rests on, and the seeds of the side that has fewest."""

    verdict: str
    ours: str = ""
    seeds: int | None = None


Check = Callable[[Sequence[Run]], Outcome]


def weakest(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=_ORDER.index)


def every(*checks: Check) -> Check:
    """Several comparisons at once: as strong as the weakest of those that were run."""

    def check(runs: Sequence[Run]) -> Outcome:
        outcomes = [one(runs) for one in checks]
        known = [outcome for outcome in outcomes if outcome.verdict != NOT_RUN]
        if not known:
            return Outcome(NOT_RUN)
        shown = "; ".join(outcome.ours for outcome in known)
        partial = f" ({len(outcomes) - len(known)} not run)" if len(known) < len(outcomes) else ""
        return Outcome(weakest(o.verdict for o in known), shown + partial, min(o.seeds or 0 for o in known))

    return check


def gaps(low: Side, high: Side, runs: Sequence[Run]) -> list[float] | None:
    """`high - low` seed by seed; None unless both have the same seeds, two or more."""
    a, b = low.by_seed(runs), high.by_seed(runs)
    return [b[seed] - a[seed] for seed in sorted(a, key=repr)] if len(a) > 1 and a.keys() == b.keys() else None


def fewest(summaries: Iterable[Summary]) -> int:
    return min(summary.n for summary in summaries)


def show(ours: Summary) -> str:
    return shown_number(ours.mean) + ("" if ours.sd is None else f" ± {shown_number(ours.sd, scale=ours.mean)}")


def shown_number(value: float, signed: bool = False, scale: float | None = None) -> str:
    """Three decimals, or three digits where a number of this scale needs them.

    >>> shown_number(0.3), shown_number(-2.5e-5), shown_number(4e-3, scale=0.3), shown_number(4e-3, signed=True)
    ('0.300', '−2.50e−5', '0.004', '+4.00e−3')
    """
    size = abs(value if scale is None else scale)
    text = format(value, ".3f" if not size or 1e-2 <= size < 1000 else ".2e")
    sign = "+" if signed and float(text) > 0 else ""
    return sign + text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def show_interval(found: Estimate) -> str:
    """A difference of accuracies, or an exponent, with its 95 % interval."""
    value, low, high = (shown_number(part, signed=True, scale=1.0) for part in (found.value, *found.interval()))
    return f"{value} [{low}, {high}]"


def named(name: str, shown: str) -> str:
    return f"{name}: {shown}" if name else shown
