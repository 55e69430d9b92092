"""A table and a figure as plain data: what the page, the CSV, the LaTeX and the plots are all made from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """What is shown, and the value behind it (for sorting and for CSV)."""

    text: str
    value: float | str | None = None
    verdict: str | None = None  # set on the cells that carry a judgement
    note: str = ""  # shown below, in small type


@dataclass(frozen=True)
class Table:
    """Rows of cells under titled columns; `commands` says how to get each line again."""

    slug: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    commands: tuple[tuple[str, str], ...] = ()
    hidden: frozenset[int] = frozenset()  # columns for programs only: they say the same in every row
    folded: bool = False  # shown on request

    def __post_init__(self) -> None:
        _check_slug(self.slug)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.slug}: {len(row)} cells under {len(self.columns)} columns")

    @property
    def shown(self) -> tuple[int, ...]:
        """The columns to show."""
        return tuple(i for i in range(len(self.columns)) if i not in self.hidden)

    @property
    def ran(self) -> bool:
        """Whether any line has something of ours in it."""
        verdicts = {cell.verdict for row in self.rows for cell in row if cell.verdict}
        return bool(self.rows) and verdicts != {"not run"}

    def is_numeric(self, column: int) -> bool:
        values = [row[column].value for row in self.rows]
        return any(isinstance(value, (int, float)) for value in values) and not any(
            isinstance(value, str) for value in values
        )


@dataclass(frozen=True)
class Curve:
    """One line of a figure. `style` names its colour and marker; `low` and `high` span the repetitions."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    markers: bool = False
    error_bars: bool = False
    dots: bool = False  # no line; `low` and `high` span along x


@dataclass(frozen=True)
class Figure:
    """Curves over a pair of axes."""

    slug: str
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str = ""
    x_ticks: tuple[float, ...] = ()
    x_names: tuple[str, ...] = ()  # what stands at the ticks, if not their numbers
    y_range: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None  # a dotted vertical line, and what it says
    log_x: bool = False
    log_y: bool = False
    legend_columns: int = 2
    y_names: tuple[str, ...] = ()  # names of the lines 0, 1, ... from top to bottom, in place of a scale

    def __post_init__(self) -> None:
        _check_slug(self.slug)

    @property
    def fingerprint(self) -> str:
        """What the figure shows, in short: drawings change with the version of matplotlib, this does not."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def mean_text(mean: float, sd: float | None) -> str:
    """A mean with its standard deviation, if it has one.

    >>> mean_text(0.5, 0.01), mean_text(0.5, None)
    ('0.500 ± 0.010', '0.500')
    """
    return number(mean).text + ("" if sd is None else f" ± {sd:.3f}")


def constant(columns: Sequence[str], rows: Sequence[Sequence[Cell]], among: Collection[str]) -> frozenset[int]:
    """The columns, of those named in `among`, that say the same in every row."""
    return frozenset(i for i, name in enumerate(columns) if name in among and len({row[i].text for row in rows}) == 1)


def slugify(words: str) -> str:
    """A name that is safe as a file's name and as an id.

    >>> slugify("training ../MNIST 1D")
    'training-mnist-1d'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _check_slug(slug: str) -> None:
    if not re.fullmatch(r"[a-z0-9-]+", slug):
        raise ValueError(f"a slug has lower-case letters, digits and hyphens only, found {slug!r}")


def text(value: object, verdict: str | None = None) -> Cell:
    return Cell(str(value), str(value), verdict)


def number(value: float | None, form: str = ".3f", signed: bool = False) -> Cell:
    """A number set with a true minus sign; nothing at all if there is none."""
    if value is None:
        return Cell("–")
    shown = format(value, ("+" if signed else "") + form)
    if not float(shown):
        shown = shown.lstrip("+-")  # what rounds to nothing has no sign
    digits, e, exponent = shown.partition("e")
    return Cell((f"{digits}e{int(exponent)}" if e else shown).replace("-", "−"), value)
