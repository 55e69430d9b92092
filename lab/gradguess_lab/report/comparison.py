"""The page of a comparison, from its record."""

from __future__ import annotations

from pathlib import Path

from gradguess_lab.compare.run import read_record
from gradguess_lab.compare.tables import compared
from gradguess_lab.files import write_atomic
from gradguess_lab.report.html import Opening, lead, render_page
from gradguess_lab.report.results import load_runs
from gradguess_lab.report.sections import Section
from gradguess_lab.report.write import write_parts
from gradguess_lab.tables.listing import environments_table

GUIDE = (
    "Every method trains the same network for the same number of epochs, at the learning rate of one grid that short "
    "runs chose. A cost is that of a training step over backpropagation's. Click a column's title to sort by it."
)


def write_comparison(directory: Path) -> Path:
    """Read `compare.json` and the runs in a directory, write the page into `report` there, return the page's path."""
    record, runs = read_record(directory), load_runs(directory, may_be_empty=True)
    sections = [Section(one.name, one.title, "", (one.table,), one.figures) for one in compared(record)]
    environments, page = environments_table(runs), directory / "report" / "compare.html"
    drawings = write_parts(page.parent, environments, sections)
    opening = Opening("Methods compared", lead(runs), guide=GUIDE)
    write_atomic(page, render_page(opening, sections, environments, drawings))
    return page
