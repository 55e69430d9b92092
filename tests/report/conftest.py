"""One report of a whole made-up paper, shared by the tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguess_lab.report.write import write_report
from report.synthetic import paper_records, write


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [r for r in paper_records() if (r["config"]["method"], r["config"]["width"]) != ("weight", 256)]
    return write_report(write(tmp_path_factory.mktemp("results"), records))
