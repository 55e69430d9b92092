"""A quick run is judged by the stored seeds of the same experiment."""

from __future__ import annotations

from dataclasses import replace

from gradguess_lab.report.html import render
from gradguess_lab.report.sections import build_sections
from gradguess_lab.tables.beside_stored import QUANTITY, beside_stored, beside_stored_figure, said, stored_runs
from gradguess_lab.tables.compare import DIFFERS, HOLDS
from gradguess_lab.tables.listing import environments_table
from gradguess_lab.tables.runs import Run, in_paper_setting


def quick(accuracy: float) -> list[Run]:
    """Runs on another device, as a quick preset has them, whose training accuracy is a stored seed's plus so much."""
    found = {}
    for run in stored_runs():
        shared = run.method != "wperp" or run.config["solver"] == "shared"
        if run.config["seed"] == 0 and run.config["width"] == 128 and in_paper_setting(run) and shared:
            metrics = {**run.metrics, QUANTITY: run.metrics[QUANTITY] + accuracy}
            found[run.label] = replace(
                run, key=f"new {run.key}", config={**run.config, "device": "mps"}, metrics=metrics
            )
    return list(found.values())


def records(runs: list[Run]) -> list[dict]:
    return [{"key": run.key, "config": run.config, "metrics": run.metrics} for run in runs]


def test_runs_that_are_alike_hold_and_others_differ():
    same, worse = quick(0.0), quick(-0.2)
    count = len(beside_stored(same))
    assert count >= 10
    assert f"Of {count} in the paper's setting {count} have" in said(records(same))
    assert f"Of {count} in the paper's setting 0 have" in said(records(worse))


def test_the_page_opens_with_the_picture_and_a_verdict():
    runs = quick(0.0)
    sections = build_sections({"runs": runs, "benchmarks": []})
    assert sections[0].slug == "beside-stored"
    assert {cell.verdict for table in sections[0].tables for row in table.rows for cell in row} == {HOLDS, None}
    figure = beside_stored_figure(runs)
    assert figure is not None
    papers = {curve.style for curve in figure.curves if curve.dashed}
    assert len(papers) == 5  # W⊥ among them, though a quick run has the shared basis, which the paper has not
    assert {"wperp", "wperp-shared"} <= {curve.style for curve in figure.curves if curve.error_bars}
    assert sum(curve.dots for curve in figure.curves) >= len(papers)
    drawings = {f.slug: "<svg></svg>" for section in sections for f in section.figures}
    page = render(runs, sections, environments_table(runs), drawings)
    assert "Runs in the interval of our stored seeds" in page
    assert DIFFERS not in page.partition("</header>")[0].rpartition("<header>")[2]


def test_stored_runs_are_not_held_against_themselves():
    assert beside_stored(stored_runs()) == []
    assert beside_stored([replace(stored_runs()[0], key="x", config={**stored_runs()[0].config, "epochs": 3})]) == []
