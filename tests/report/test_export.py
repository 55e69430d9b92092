"""CSV keeps every number; LaTeX keeps every row, and nothing in it is live."""

from __future__ import annotations

import csv
import io
import re

from gradguess_lab.report.export import to_csv, to_latex
from gradguess_lab.tables.paper import scaling_table
from gradguess_lab.tables.table import Table, number, text
from report.synthetic import paper_records, runs


def test_csv_round_trip():
    table = scaling_table(runs(*paper_records()))
    header, *rows = csv.reader(io.StringIO(to_csv(table)))
    assert tuple(header) == table.columns
    assert len(rows) == len(table.rows) == 20
    for read, cells in zip(rows, table.rows, strict=True):
        for got, cell in zip(read, cells, strict=True):
            assert (float(got) if isinstance(cell.value, (int, float)) else got) == (cell.value or "")


def test_csv_runs_no_formula():
    table = Table("t", "t", ("a", "b"), ((text("=HYPERLINK(1)"), number(-1.5)),))
    assert list(csv.reader(io.StringIO(to_csv(table))))[1] == ["'=HYPERLINK(1)", "-1.5"]


def test_latex_round_trip():
    table = scaling_table(runs(*paper_records()))
    source = to_latex(table)
    body = source[source.index(r"\midrule") : source.index(r"\bottomrule")].splitlines()[1:]
    cells = [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in body]
    assert [len(row) for row in cells] == [len(table.shown)] * 20
    assert source.count(r"\begin{") == source.count(r"\end{")
    assert {r"\toprule", r"\midrule", r"\bottomrule"} <= set(source.splitlines())
    assert cells[0][0] == "Weight perturbation"
