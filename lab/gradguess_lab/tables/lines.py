"""One published number beside ours, and tables of such lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import SETTING, Published
from gradguess_lab.tables.compare import DIFFERS, Kind, Summary, kind_of, rounding_floor, verdict
from gradguess_lab.tables.reasons import reasons
from gradguess_lab.tables.runs import Run, Variant, command, select
from gradguess_lab.tables.table import Cell, Table, constant, number, text

_COLUMNS = (
    *("Method", "Width", "Quantity"),
    *("Paper", "Ours", "± sd", "Difference", "Verdict", "Seeds", "Computed by"),
)
DIAGNOSED = "0,1,3,10,30,100,200,300"  # the epochs at which a run of this repository is diagnosed
_DESCRIBING = ("Width", "Quantity", "Computed by")  # hidden where they say the same in every row


@dataclass(frozen=True)
class Line:
    """A published number, and ours computed in one way (or not at all).

    An entry has one main line: the method by the paper's definition where that was run.
    """

    entry: Published
    variant: Variant | None
    ours: Summary | None
    main: bool = True

    @property
    def verdict(self) -> str:
        return verdict(self.entry, self.ours, self._noise_floor())

    def _noise_floor(self) -> float | None:
        """What rounding makes of a bias that is zero by construction."""
        entry = self.entry
        if self.variant is None or (entry.method, entry.quantity) != ("wp", "bias"):
            return None
        norms = Summary.of(self.variant.values("gradient_norm", entry.layer))
        return rounding_floor(entry.width, norms.mean, self.variant.first.config.get("batch", 512)) if norms else None

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
        wanted |= {"solver": "subspace"} if entry.method in {"wperp", "wperp-bottom"} else {}
        return command(wanted | ({"diagnose": DIAGNOSED} if entry.layer is not None else {}))


def compare(entries: Iterable[Published], runs: Sequence[Run]) -> Iterator[Line]:
    """Each entry once for every way it was computed; once without numbers if it was not run."""
    for entry in entries:
        lines: list[Line] = []
        for variant in select(runs, entry.method, entry.width, entry.k):
            ours = Summary.of(variant.values(entry.quantity, entry.layer))
            lines += [Line(entry, variant, ours, main=not lines)] if ours else []
        yield from lines or [Line(entry, None, None)]


def comparison_table(slug: str, title: str, lines: Iterable[Line], caption: str) -> Table:
    """A row per line; below it, what is known of those that differ; what is the same in all rows is not shown."""
    lines = list(lines)
    rows = tuple(_row(line) for line in lines)
    notes = " ".join(reasons(line.entry for line in lines if line.verdict == DIFFERS))
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
        quantity_cell(line.entry.value, kind),
        quantity_cell(ours.mean if ours else None, kind),
        quantity_cell(ours.sd if ours else None, kind),
        quantity_cell(ours.mean - line.entry.value if ours else None, kind, signed=True),
        text(line.verdict, line.verdict),
        number(ours.n if ours else None, "d"),
        text(line.computed_by),
    )


def quantity_cell(value: float | None, kind: Kind, signed: bool = False) -> Cell:
    if kind.form == "duration" and value is not None:
        return Cell(_duration(value, signed), value)
    return number(value, kind.form, signed)


def _duration(seconds: float, signed: bool = False) -> str:
    sign = "−" if seconds < 0 else "+" if signed else ""
    size = abs(seconds)
    if size < 60:
        return f"{sign}{size:.1f} s"
    return f"{sign}{size / 60:.0f} min" if size < 3600 else f"{sign}{size / 3600:.1f} h"
