"""A table as plain data: what the page, the docs, the CSV and the LaTeX are all made from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, ParamSpec

import pandas as pd

from gradguess_lab.tables.verdicts import DIFFERS, HOLDS, NOT_RUN, Summary

Row = Mapping[str, Any]
P = ParamSpec("P")
Rows = Callable[P, Iterable[Row]]
# How numbers are set, by the name of their column; others have three decimals. Whole numbers stand as they are.
FORMS = {
    **dict.fromkeys(("Variance", "Bias", "Gradient norm"), ".2e"),
    **dict.fromkeys(("Difference", "Test against backprop"), "+.3f"),
    **dict.fromkeys(("Ratio", "Quiet ratio", "Time ratio", "Time", "Cosine of a step", "Exponent"), ".2f"),
    **dict.fromkeys(("Learning rate", "Rate"), "g"),
    **dict.fromkeys(("Step, ms", "Refresh, ms"), ".3g"),
    **dict.fromkeys(("Memory, MB", "of it gradients", "First steps, s", "First start, s", "Second start, s"), ".1f"),
}
MARKS = {HOLDS: " ✓", DIFFERS: " ✗"}


@dataclass(frozen=True)
class Cell:
    """What is shown, and the value behind it (for sorting and for CSV)."""

    text: str
    value: float | str | None = None
    verdict: str | None = None  # set on the cells that carry a judgement
    note: str = ""  # shown below, in small type
    sd: float | None = None  # of the runs behind the value


def number(value: float | None, form: str = ".3f") -> str:
    """A number with a true minus sign, and a dash if there is none; the form "duration" takes seconds.

    >>> number(-2e-05, ".2e"), number(-0.0001), number(5400.0, "duration"), number(None)
    ('−2.00e−5', '0.000', '1.5 h', '–')
    """
    if value is None:
        return "–"
    if form.endswith("duration"):
        units = ((3600, "h", 1), (60, "min", 0), (1, "s", 1))
        size, unit, places = next(one for one in units if abs(value) >= one[0] or one[1] == "s")
        return f"{value / size:.{places}f} {unit}".replace("-", "−")
    shown = format(value, form)
    if not float(shown.replace(",", "")):
        shown = shown.lstrip("+-")  # what rounds to nothing has no sign
    digits, e, exponent = shown.partition("e")
    return (f"{digits}e{int(exponent)}" if e else shown).replace("-", "−")


def cell(value: Any, form: str = ".3f", verdict: str | None = None, note: str = "") -> Cell:
    """A value as it is shown; a mean has its standard deviation, if it has one.

    >>> cell(Summary(0.5, 0.01, 3)).text, cell(Summary(0.5, None, 1)).text, cell(None).text, cell(12).text
    ('0.500 ± 0.010', '0.500', '–', '12')
    """
    if isinstance(value, Cell):
        return value
    if isinstance(value, Summary):
        spread = "" if value.sd is None else f" ± {number(value.sd, form.lstrip('+'))}"
        return Cell(number(value.mean, form) + spread, value.mean, verdict, note, value.sd)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, float):
        return Cell(number(value, form), value, verdict, note)
    if value is None:
        return Cell("–", None, verdict, note)
    return Cell(str(value), value, verdict, note)


@dataclass(frozen=True)
class Table:
    """Rows by column. Columns in `same` are not shown where they say the same in every row.

    `commands` says how to get each line again; a table that is `folded` is shown on request.
    """

    slug: str
    title: str
    rows: Sequence[Row]
    caption: str = ""
    same: Sequence[str] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False
    forms: Mapping[str, str] = field(default_factory=dict)  # beside `FORMS`

    @cached_property
    def cells(self) -> list[dict[str, Cell]]:
        """A cell for every row and column. In the column "Verdict" a cell is judged by what it says."""
        forms, names = FORMS | dict(self.forms), list(dict.fromkeys(name for row in self.rows for name in row))

        def made(name: str, value: Any) -> Cell:
            return cell(value, forms.get(name, ".3f"), value if name == "Verdict" else None)

        return [{name: made(name, row.get(name)) for name in names} for row in self.rows]

    @cached_property
    def columns(self) -> list[str]:
        """Those that are shown."""
        names = list(self.cells[0]) if self.rows else []
        return [name for name in names if name not in self.same or len({row[name].text for row in self.cells}) > 1]

    @property
    def ran(self) -> bool:
        """Whether any line has something of ours in it."""
        return bool(self.rows) and {c.verdict for row in self.cells for c in row.values() if c.verdict} != {NOT_RUN}

    @cached_property
    def numeric(self) -> set[str]:
        """The columns that hold numbers alone."""
        kinds = {name: {type(row[name].value) for row in self.cells} - {type(None)} for name in self.columns}
        return {name for name, found in kinds.items() if found and found <= {int, float}}

    def where(self, column: str, *kept: str) -> Table:
        """The table with those rows alone that say one of these in a column."""
        return replace(self, rows=[row for row in self.cells if row[column].text in kept])

    def csv(self) -> str:
        """One line per row, numbers as they were computed, of hidden columns too; a missing number is an empty field.

        A mean has its standard deviation in a column of its own.
        """
        columns: dict[str, list[Any]] = {}
        for name in self.cells[0] if self.rows else ():
            column = [row[name] for row in self.cells]
            columns[name] = [_field(one.value) for one in column]
            if any(one.sd is not None for one in column):
                columns[f"{name}, sd"] = [_field(one.sd) for one in column]
        return pd.DataFrame(columns, dtype=object).to_csv(index=False, lineterminator="\n")

    def markdown(self, *columns: str) -> str:
        """The columns that are shown, or those that are named; a cell's mark and note follow it."""
        names = [name for name in (columns or self.columns) if self.rows and name in self.cells[0]]
        body = [[_marked(row[name]) for name in names] for row in self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *body))

    def latex(self) -> str:
        """A `table` environment; the document needs `\\usepackage{booktabs}`."""
        shown = [[row[name] for name in self.columns] for row in self.cells]
        body = [[latex_text(one.text + f" ({one.note})" * bool(one.note)) for one in row] for row in shown]
        heads = [rf"\textbf{{{latex_text(name)}}}" for name in self.columns]
        return pd.DataFrame(body, columns=heads).to_latex(
            index=False,
            escape=False,
            caption=latex_text(self.caption or self.title),
            label=f"tab:{self.slug}",
            column_format="".join("r" if name in self.numeric else "l" for name in self.columns),
        )


def table(slug: str, title: str = "", caption: str = "", **more: Any) -> Callable[[Rows[P]], Callable[P, Table]]:
    """A function that yields rows becomes one that returns the table of them."""
    return lambda rows: wraps(rows)(lambda *of, **told: Table(slug, title, list(rows(*of, **told)), caption, **more))


def matrix(corner: str, found: Iterable[tuple[Any, str, Any]], columns: Sequence[str] = ()) -> Iterable[dict[str, Any]]:
    """Rows of a table from (row, column, value), in this order of columns; what is missing is a dash."""
    rows: dict[Any, dict[str, Any]] = {}
    for row, column, value in found:
        rows.setdefault(row, {corner: row, **dict.fromkeys(columns)})[column] = value
    return rows.values()


def slugify(words: str) -> str:
    """A name that is safe as a file's name and as an id.

    >>> slugify("training ../MNIST 1D")
    'training-mnist-1d'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _field(value: Any) -> Any:
    """Missing is not NaN; a spreadsheet would run a text that starts like a formula."""
    if value is None or value != value:
        return "" if value is None else "nan"
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def _marked(one: Cell) -> str:
    judged = one.verdict is not None and one.verdict != one.text
    return one.text + (MARKS.get(one.verdict or "", "") if judged else "") + (f" ({one.note})" if one.note else "")


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}",
    "Wᵀ": r"$\tilde{W}^\top$", "W⊥": r"$\tilde{W}^\perp$", "Wᴾ": r"$\tilde{W}^{\mathrm{P}}$",
    "±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$", "√": r"$\surd$",
    "·": r"$\cdot$", "…": r"\dots{}", "–": "--", "σ": r"$\sigma$",
}  # fmt: skip
_TOKEN = re.compile("|".join([r"(?<=\d)e(−?\d+)", *map(re.escape, sorted(_LATEX, key=len, reverse=True))]))


def latex_text(text: str) -> str:
    r"""Text with every special character set for LaTeX.

    >>> latex_text("W⊥ & 50 %: 2e−5")
    '$\\tilde{W}^\\perp$ \\& 50 \\%: 2 $\\times 10^{-5}$'
    """
    return _TOKEN.sub(lambda m: rf" $\times 10^{{{m[1].replace('−', '-')}}}$" if m[1] else _LATEX[m[0]], text)
