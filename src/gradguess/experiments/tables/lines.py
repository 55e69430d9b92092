"""One published number beside ours, and tables of such lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradguess.experiments.methods import method_label
from gradguess.experiments.paper_numbers import SETTING, Published
from gradguess.experiments.tables.compare import DIFFERS, Kind, Summary, kind_of, verdict
from gradguess.experiments.tables.runs import Run, Variant, command, select
from gradguess.experiments.tables.table import Cell, Table, constant, number, text

_COLUMNS = (
    *("Method", "Width", "Quantity"),
    *("Paper", "Ours", "± sd", "Difference", "Verdict", "Seeds", "Computed by"),
)
_DESCRIBING = ("Width", "Quantity", "Computed by")  # hidden where they say the same in every row


# Why a number of ours may differ from the paper's: shown under a table that has such lines.
_UNSTATED_STEP = (
    "The paper does not state the step at which bias and variance were measured; both fall with the gradient "
    "during training. The order of the methods is what the claims compare."
)

_REASONS = {
    ("wp", "bias"): (
        "The exact bias of Wᴾ is zero at this layer: what is printed, in the paper and here, is the rounding "
        "of the arithmetic and the regularisation σ."
    ),
    (None, "variance"): _UNSTATED_STEP,
    (None, "bias"): _UNSTATED_STEP,
    (None, "rank"): (
        "The rank is that of W M with M the ReLU mask: it counts active units, and varies with the sample "
        "and with the initial weights. Ours is the mean over a batch; the paper gives one number."
    ),
}


@dataclass(frozen=True)
class Line:
    """A published number, and ours computed in one way (or not at all)."""

    entry: Published
    variant: Variant | None
    ours: Summary | None

    @property
    def verdict(self) -> str:
        return verdict(self.entry, self.ours)

    @property
    def method(self) -> str:
        named = method_label(self.entry.method)
        return named if self.entry.k is None else f"{named}, k = {self.entry.k}"

    @property
    def quantity(self) -> str:
        name = kind_of(self.entry.quantity).name
        return name if self.entry.layer is None else f"{name}, layer {self.entry.layer}"

    @property
    def computed_by(self) -> str:
        return self.variant.label if self.variant else ""

    @property
    def command(self) -> str:
        """How to get this line: the run itself, or what it would have been."""
        if self.variant is not None:
            return command(self.variant.first.config)
        entry = self.entry
        wanted = {**SETTING, "method": entry.method, "width": entry.width, "seed": 0, "k": entry.k}
        return command(wanted | ({"diagnose": 50} if entry.layer is not None else {}))


def compare(entries: Iterable[Published], runs: Sequence[Run]) -> Iterator[Line]:
    """Each entry once for every way it was computed; once without numbers if it was not run."""
    for entry in entries:
        lines = []
        for variant in select(runs, entry.method, entry.width, entry.k):
            ours = Summary.of(variant.values(entry.quantity, entry.layer))
            lines += [Line(entry, variant, ours)] if ours else []
        yield from lines or [Line(entry, None, None)]


def comparison_table(slug: str, title: str, lines: Iterable[Line], caption: str) -> Table:
    """A row per line; below it, why some differ; what is the same in all rows is not shown."""
    lines = list(lines)
    rows = tuple(_row(line) for line in lines)
    reasons = dict.fromkeys(_reason(line.entry) for line in lines if line.verdict == DIFFERS)
    notes = " ".join(note for note in reasons if note)
    return Table(
        slug,
        title,
        _COLUMNS,
        rows,
        f"{caption} {notes}".strip(),
        tuple({_name(line): line.command for line in lines}.items()),
        hidden=constant(_COLUMNS, rows, _DESCRIBING),
    )


def _name(line: Line) -> str:
    by = f" ({line.computed_by})" if line.computed_by else ""
    return f"{line.method}, width {line.entry.width}{by}"


def _row(line: Line) -> tuple[Cell, ...]:
    kind, ours = kind_of(line.entry.quantity), line.ours
    return (
        text(line.method),
        number(line.entry.width, "d"),
        text(line.quantity),
        _quantity(line.entry.value, kind),
        _quantity(ours.mean if ours else None, kind),
        _quantity(ours.sd if ours else None, kind),
        _quantity(ours.mean - line.entry.value if ours else None, kind, signed=True),
        text(line.verdict, line.verdict),
        number(ours.n if ours else None, "d"),
        text(line.computed_by),
    )


def _quantity(value: float | None, kind: Kind, signed: bool = False) -> Cell:
    if kind.form == "duration" and value is not None:
        return Cell(_duration(value, signed), value)
    return number(value, kind.form, signed)


def _duration(seconds: float, signed: bool = False) -> str:
    sign = "−" if seconds < 0 else "+" if signed else ""
    size = abs(seconds)
    if size < 60:
        return f"{sign}{size:.1f} s"
    return f"{sign}{size / 60:.0f} min" if size < 3600 else f"{sign}{size / 3600:.1f} h"


def _reason(entry: Published) -> str | None:
    """The most specific explanation on record."""
    return _REASONS.get((entry.method, entry.quantity)) or _REASONS.get((None, entry.quantity))
