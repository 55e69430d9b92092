"""The page of a comparison, from its record."""

from __future__ import annotations

from pathlib import Path

from gradguess.experiments.compare.run import read_record
from gradguess.experiments.compare.tables import compared
from gradguess.experiments.files import write_atomic
from gradguess.experiments.tables.listing import environments_table
from gradguess.report.html import Opening, lead, render_page
from gradguess.report.results import load_runs
from gradguess.report.sections import Section
from gradguess.report.write import write_parts

GUIDE = (
    "Every method trains the same network for the same number of epochs, at the learning rate of one grid that short "
    "runs chose. A cost is that of a training step over backpropagation's. Click a column's title to sort by it."
)


def write_comparison(directory: Path) -> Path:
    """Read `compare.json` and the runs in a directory, write the page into `report` there, return the page's path."""
    record, runs = read_record(directory / "compare.json"), load_runs(directory, may_be_empty=True)
    sections = [Section(one.name, one.title, "", (one.table,), one.figures) for one in compared(record)]
    environments, page = environments_table(runs), directory / "report" / "compare.html"
    drawings = write_parts(page.parent, environments, sections)
    opening = Opening("Methods compared", lead(runs), guide=GUIDE)
    write_atomic(page, render_page(opening, sections, environments, drawings))
    return page
