"""From a directory of results to the report's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradguess_lab.files import explained, write_atomic
from gradguess_lab.report.export import to_csv, to_latex
from gradguess_lab.report.html import render
from gradguess_lab.report.plot import draw, themed
from gradguess_lab.report.results import load_benchmarks, load_runs
from gradguess_lab.report.sections import Section, build_sections
from gradguess_lab.tables.listing import environments_table
from gradguess_lab.tables.table import Table


def write_report(results_dir: Path, out: Path | None = None) -> Path:
    """Read every result under `results_dir`, write the report into the folder `out`, return the page's path.

    `out` defaults to `results_dir/report`; a name that ends in `.html` is the page itself. Beside the page
    come `tables/*.csv`, `tables/*.tex`, `figures/*.png` and `figures/*.svg`.
    """
    results_dir = Path(results_dir)
    page = _page_path(results_dir, out)
    benchmarks = load_benchmarks(results_dir)
    runs = load_runs(results_dir, may_be_empty=bool(benchmarks))
    sections = build_sections({"runs": runs, "benchmarks": benchmarks})
    environments = environments_table(runs)
    drawings = write_parts(page.parent, environments, sections)
    write_atomic(page, render(runs, sections, environments, drawings))
    return page


def write_parts(folder: Path, environments: Table, sections: Sequence[Section]) -> dict[str, str]:
    """Every table and every figure as files; the drawings for the page."""
    _write_tables(folder / "tables", [environments, *(table for s in sections for table in s.tables)])
    return _write_figures(folder / "figures", sections)


def _page_path(results_dir: Path, out: Path | None) -> Path:
    if out is None:
        return results_dir / "report" / "report.html"
    return Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"


def _write_tables(folder: Path, tables: Sequence[Table]) -> None:
    _make(folder)
    for table in tables:
        write_atomic(folder / f"{table.slug}.csv", to_csv(table))
        write_atomic(folder / f"{table.slug}.tex", to_latex(table))


def _write_figures(folder: Path, sections: Sequence[Section]) -> dict[str, str]:
    """Draw every figure once; the themed drawings by slug, for the page."""
    _make(folder)
    drawings = {}
    for number, figure in enumerate(figure for section in sections for figure in section.figures):
        drawing = draw(figure)
        write_atomic(folder / f"{figure.slug}.png", drawing.png)
        write_atomic(folder / f"{figure.slug}.svg", drawing.svg)
        drawings[figure.slug] = themed(drawing.inline, f"f{number}")
    return drawings


def _make(folder: Path) -> None:
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
