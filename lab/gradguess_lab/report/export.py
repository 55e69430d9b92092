"""Tables as CSV (full precision, for programs) and as LaTeX with booktabs (as shown, for papers)."""

from __future__ import annotations

import csv
import io
import re

from gradguess_lab.tables.table import Cell, Table

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}",
    "Wᵀ": r"$\tilde{W}^\top$", "W⊥": r"$\tilde{W}^\perp$", "Wᴾ": r"$\tilde{W}^{\mathrm{P}}$",
    "±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$", "√": r"$\surd$",
    "·": r"$\cdot$", "…": r"\dots{}", "–": "--", "σ": r"$\sigma$",
}  # fmt: skip
_LONGEST_FIRST = sorted(_LATEX, key=len, reverse=True)
_POWER = r"(?<=\d)e(−?\d+)"
_TOKEN = re.compile("|".join([_POWER, *map(re.escape, _LONGEST_FIRST)]))


def to_csv(table: Table) -> str:
    """One line per row, numbers as they were computed; a missing number is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow([_csv_field(cell) for cell in row])
    return out.getvalue()


def _csv_field(cell: Cell) -> object:
    if cell.value is None:
        return ""
    # a spreadsheet would run a text that starts like a formula
    if isinstance(cell.value, str) and cell.value[:1] in "=+-@\t\r" and cell.value:
        return "'" + cell.value
    return cell.value


def to_latex(table: Table) -> str:
    """A `table` environment; the document needs `\\usepackage{booktabs}`."""
    shown = ([row[i] for i in table.shown] for row in table.rows)
    align = "".join("r" if table.is_numeric(i) else "l" for i in table.shown)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.caption or table.title)}}}",
        rf"\label{{tab:{table.slug}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        _latex_row([rf"\textbf{{{latex_text(table.columns[i])}}}" for i in table.shown]),
        r"\midrule",
        *(_latex_row([latex_text(c.text + f" ({c.note})" * bool(c.note)) for c in row]) for row in shown),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def latex_text(text: str) -> str:
    r"""Text with every special character set for LaTeX.

    >>> latex_text("W⊥ & 50 %: 2e−5")
    '$\\tilde{W}^\\perp$ \\& 50 \\%: 2 $\\times 10^{-5}$'
    """
    return _TOKEN.sub(_latex_token, text)


def _latex_token(match: re.Match[str]) -> str:
    if match.group(1):
        return rf" $\times 10^{{{match.group(1).replace('−', '-')}}}$"
    return _LATEX[match.group()]
