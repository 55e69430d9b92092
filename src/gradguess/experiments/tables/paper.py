"""The paper's tables, each entry beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradguess.experiments.paper_numbers import (
    BIAS_VARIANCE,
    CHOICE_OF_K,
    NEWTON_SCHULZ,
    PRECONDITIONING,
    RANKS,
    SCALING,
    SETTING,
    WIDTHS,
    Published,
)
from gradguess.experiments.tables.compare import (
    DIFFERS,
    NOT_COMPARED,
    NOT_RUN,
    Kind,
    Summary,
    kind_of,
    verdict,
)
from gradguess.experiments.tables.reasons import reason
from gradguess.experiments.tables.runs import Run, Variant, command, method_label, select
from gradguess.experiments.tables.table import Cell, Table, number, text

__all__ = [
    "Line",
    "bias_variance_table",
    "choice_of_k_table",
    "compare",
    "newton_schulz_table",
    "preconditioning_table",
    "rank_table",
    "scaling_matrix",
    "scaling_table",
]

COLUMNS = (
    "Method",
    "Width",
    "Quantity",
    "Computed by",
    "Paper",
    "Ours",
    "± sd",
    "Seeds",
    "Difference",
    "Verdict",
)


@dataclass(frozen=True)
class Line:
    """One published number beside ours, computed in one way."""

    entry: Published
    variant: Variant | None
    ours: Summary | None
    published: bool = True  # False for a layer the paper leaves out

    @property
    def verdict(self) -> str:
        if not self.published:
            return NOT_COMPARED if self.ours else NOT_RUN
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
    def command(self) -> str:
        """How to get this line: the run itself, or what it would have been."""
        if self.variant is not None:
            return command(self.variant.first.config)
        entry = self.entry
        wanted = {**SETTING, "method": entry.method, "width": entry.width, "seed": 0, "k": entry.k}
        diagnosed = entry.layer is not None
        return command(wanted) + (" --diagnose 10" if diagnosed else "")


def compare(entries: Iterable[Published], runs: Sequence[Run]) -> Iterator[Line]:
    """Each entry once for every way it was computed; once without numbers if it was not run."""
    for entry in entries:
        found = False
        for variant in select(runs, entry.method, entry.width, entry.k, entry.solver):
            ours = Summary.of(variant.values(entry.quantity, entry.layer))
            if ours is not None:
                found = True
                yield Line(entry, variant, ours)
        if not found:
            yield Line(entry, None, None)


def choice_of_k_table(runs: Sequence[Run]) -> Table:
    return _table(
        "choice-of-k",
        "Choice of k",
        compare(CHOICE_OF_K, runs),
        "Training accuracy after 300 epochs for different k in W⊥ (width 128); k = rank keeps all of it.",
    )


def rank_table(runs: Sequence[Run]) -> Table:
    return _table(
        "ranks",
        "Ranks of the upstream Jacobian",
        compare(RANKS, runs),
        "The ranks in the legends of the overlap figure. Ours: mean over a batch, trained with W⊥, k = 10.",
    )


def bias_variance_table(runs: Sequence[Run]) -> Table:
    lines = list(compare(BIAS_VARIANCE, runs))
    others = [replace(entry, layer=layer) for layer in (2, 3) for entry in BIAS_VARIANCE]
    lines += [replace(line, published=False) for line in compare(others, runs) if line.ours]
    return _table(
        "bias-variance",
        "Variance, bias and covariance norm",
        lines,
        "Width 128, at the last diagnosed epoch. The paper states no layer: its numbers stand beside our "
        "layer 1, and layers 2 and 3 follow without a counterpart.",
    )


def scaling_table(runs: Sequence[Run]) -> Table:
    return _table(
        "scaling",
        "Scaling with the width, entry by entry",
        compare(SCALING, runs),
        "Training accuracy after 300 epochs; three hidden layers of the given width.",
    )


def newton_schulz_table(runs: Sequence[Run]) -> Table:
    return _table(
        "newton-schulz",
        "W⊥-NS",
        compare(NEWTON_SCHULZ, runs),
        "Training time of 300 epochs, and accuracy. The paper's times are those of a laptop, with the SVD on its CPU.",
    )


def preconditioning_table(runs: Sequence[Run]) -> Table:
    return _table(
        "preconditioning",
        "Preconditioning",
        compare(PRECONDITIONING, runs),
        "Width 256: variance and bias at layer 1, and accuracy after 300 epochs.",
    )


def scaling_matrix(runs: Sequence[Run]) -> Table:
    """The scaling table in the paper's form: a row per width, a column per method, its number in brackets."""
    methods = list(dict.fromkeys(entry.method for entry in SCALING))
    best: dict[tuple[int, str], Line] = {}
    for line in compare(SCALING, runs):
        best.setdefault((line.entry.width, line.entry.method), line)  # most seeds come first
    rows = tuple((number(width, "d"), *(_matrix_cell(best[width, method]) for method in methods)) for width in WIDTHS)
    titles = tuple(method_label(method) + (", k = 10" if method == "wperp" else "") for method in methods)
    return Table(
        "scaling-matrix",
        "Scaling with the width",
        ("Width", *titles),
        rows,
        "Training accuracy after 300 epochs: ours, with the paper's number in brackets.",
    )


def _matrix_cell(line: Line) -> Cell:
    paper = f"({line.entry.value:.3f})"
    if line.ours is None:
        return Cell(f"– {paper}", None, line.verdict)
    spread = "" if line.ours.sd is None else f" ± {line.ours.sd:.3f}"
    return Cell(f"{line.ours.mean:.3f}{spread} {paper}", line.ours.mean, line.verdict)


def _table(slug: str, title: str, lines: Iterable[Line], caption: str) -> Table:
    lines = list(lines)
    columns, rows = _drop_empty(COLUMNS, [_row(line) for line in lines])
    why = dict.fromkeys(reason(line.entry) for line in lines if line.verdict == DIFFERS)
    notes = " ".join(note for note in why if note)
    commands = {f"{line.method}, width {line.entry.width}" + _by(line): line.command for line in lines}
    return Table(slug, title, columns, rows, f"{caption} {notes}".strip(), tuple(commands.items()))


def _by(line: Line) -> str:
    return f" ({line.variant.label})" if line.variant and line.variant.label else ""


def _row(line: Line) -> tuple[Cell, ...]:
    kind, ours = kind_of(line.entry.quantity), line.ours
    difference = ours.mean - line.entry.value if ours and line.published else None
    return (
        text(line.method),
        number(line.entry.width, "d"),
        text(line.quantity),
        text(line.variant.label if line.variant else ""),
        _quantity(line.entry.value, kind) if line.published else Cell("–"),
        _quantity(ours.mean if ours else None, kind),
        _quantity(ours.sd if ours else None, kind),
        number(ours.n if ours else None, "d"),
        _quantity(difference, kind, signed=True),
        text(line.verdict, line.verdict),
    )


def _quantity(value: float | None, kind: Kind, signed: bool = False) -> Cell:
    if kind.name == "Training time" and value is not None:
        return Cell(_duration(value, signed), value)
    return number(value, kind.form, signed)


def _duration(seconds: float, signed: bool = False) -> str:
    sign = "−" if seconds < 0 else "+" if signed else ""
    size = abs(seconds)
    if size < 60:
        return f"{sign}{size:.1f} s"
    return f"{sign}{size / 60:.0f} min" if size < 3600 else f"{sign}{size / 3600:.1f} h"


def _drop_empty(
    columns: tuple[str, ...], rows: Sequence[tuple[Cell, ...]]
) -> tuple[tuple[str, ...], tuple[tuple[Cell, ...], ...]]:
    """Leave out the solver where there is no choice of one."""
    keep = [i for i in range(len(columns)) if columns[i] != "Computed by" or any(row[i].text for row in rows)]
    return tuple(columns[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in rows)
