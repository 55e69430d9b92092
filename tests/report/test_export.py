"""CSV keeps every number; LaTeX keeps every row, and nothing in it is live."""

from __future__ import annotations

import csv
import io
import re

from gradguess_lab.report.export import latex_text, to_csv, to_latex
from gradguess_lab.report.plot import draw
from gradguess_lab.tables.paper import scaling_table
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Cell, Curve, Figure, Table, number, text
from report.synthetic import paper_records


def runs() -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in paper_records()]


def test_csv_round_trip():
    table = scaling_table(runs())
    header, *rows = csv.reader(io.StringIO(to_csv(table)))
    assert tuple(header) == table.columns
    assert len(rows) == len(table.rows) == 20
    for read, cells in zip(rows, table.rows, strict=True):
        for got, cell in zip(read, cells, strict=True):
            assert (float(got) if isinstance(cell.value, (int, float)) else got) == (cell.value or "")


def test_csv_has_awkward_names_and_gaps():
    table = Table("t", "t", ("a", "b"), ((text('x, "y"\nz'), number(None)),))
    assert list(csv.reader(io.StringIO(to_csv(table)))) == [["a", "b"], ['x, "y"\nz', ""]]


def test_csv_runs_no_formula():
    table = Table("t", "t", ("a", "b"), ((text("=HYPERLINK(1)"), number(-1.5)),))
    assert list(csv.reader(io.StringIO(to_csv(table))))[1] == ["'=HYPERLINK(1)", "-1.5"]


def test_latex_round_trip():
    table = scaling_table(runs())
    source = to_latex(table)
    body = source[source.index(r"\midrule") : source.index(r"\bottomrule")].splitlines()[1:]
    cells = [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in body]
    assert [len(row) for row in cells] == [len(table.shown)] * 20
    assert source.count(r"\begin{") == source.count(r"\end{")
    assert {r"\toprule", r"\midrule", r"\bottomrule"} <= set(source.splitlines())
    assert cells[0][0] == "Weight perturbation"


def test_latex_sets_signs_and_escapes_the_rest():
    assert latex_text("W⊥, k = 10 ± 1e−5") == r"$\tilde{W}^\perp$, k = 10 $\pm$ 1 $\times 10^{-5}$"
    assert latex_text(r"\input{x} $a_b$ 5 %") == r"\textbackslash{}input\{x\} \$a\_b\$ 5 \%"


def test_latex_source_is_plain_ascii():
    assert to_latex(scaling_table(runs())).isascii()


def test_notes_go_into_brackets():
    table = Table("t", "t", ("a",), ((Cell("0.5", 0.5, "holds", "paper 0.4"),),))
    assert "0.5 (paper 0.4)" in to_latex(table)


def test_a_logarithmic_axis_has_plain_numbers():
    figure = Figure("steep", "Steep", "x", "y", (Curve("a", [1, 2, 3], [1e-7, 1e-5, 1e-3], "wperp"),), log_y=True)
    svg = draw(figure).svg
    assert "mathdefault" not in svg
    assert "<!-- 1e−05 -->" in svg  # the minus sign of print
