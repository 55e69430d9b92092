"""What a reader sees in tables and figures beyond the numbers: units, styles, axes, names, what is left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradguess_lab.report.plot import draw
from gradguess_lab.tables.bench import bench_figures, bench_tables
from gradguess_lab.tables.claims import CLAIMS
from gradguess_lab.tables.curves import overlap_figures, training_figures
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.feedback_figures import feedback_figures
from gradguess_lab.tables.layers import layers_table
from gradguess_lab.tables.lines import _duration
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Curve, Figure
from report.synthetic import Record, diagnosed, record


def runs(*records: Record) -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in records]


def measured(width: int, **changes: Any) -> Record:
    setting = {"method": "wperp", "width": width, "depth": 3, "batch": 8, "k": 2, "dtype": "float32", "device": "cpu"}
    times = {"ratio": 1.5, "quiet_ratio": 1.5, "step_ms": 1.0, "refresh_ms": 1.0, "peak_mb": 1.0, "scaled_from": None}
    return {**setting, **times, **changes}


def bench(*rows: Record) -> Record:
    where = {"device": "cpu", "threads": 1, "torch": "2", "load_before": 0.0, "load_after": 0.0}
    return {"kind": "time", "rows": list(rows), "growth": [], "environment": where}


def test_a_ratio_has_digits_up_to_a_hundred_and_says_what_it_was_scaled_from():
    rows = measured(8, quiet_ratio=99.44), measured(16, quiet_ratio=100.4, scaled_from=2)
    (table,) = bench_tables([bench(*rows)])
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["Quiet ratio"].text for row in cells] == ["99.44", "100"]
    assert [row["Note"].text for row in cells] == ["", "scaled from 2 samples"]


def test_points_that_were_measured_are_marked():
    (figure,) = bench_figures([bench(measured(8), measured(16))])
    assert all(curve.markers for curve in figure.curves)


def test_a_claim_about_ten_directions_looks_at_the_tenth():
    (claim,) = (claim for claim in CLAIMS if claim.says.startswith("Layer 3 has rank 10"))

    def verdict(overlap: list[float]) -> str:
        found = [diagnosed(record(width=width, seed=s)) for width in (128, 512) for s in range(3)]
        for result in found:
            for entry in result["diagnostics"]:
                entry["sites"]["4"]["overlap"] = overlap
        return claim.check(runs(*found)).verdict

    assert verdict([0.5] * 9 + [1.0, 1.0]) == "holds"
    assert verdict([0.5] * 10 + [1.0]) != "holds"


def test_a_share_is_drawn_from_nothing_to_all():
    (figure,) = overlap_figures(runs(diagnosed(record())))
    assert figure.y_range is not None
    assert figure.y_range == pytest.approx((0, 1), abs=0.05)


def test_each_k_has_a_shade_for_wperp_alone():
    found = runs(record("wperp", k=5), record("wperp", k=10), record("wt", k=5), record("wperp-ns", k=5))
    styles = {curve.style for figure in training_figures(found) for curve in figure.curves}
    assert styles == {"wperp-5", "wperp", "wt", "wperp-ns"}


def test_a_dataset_may_have_any_name():
    """Superscripts are digits, and no numbers."""
    found = runs(record(data="²", key="a"), record(data="10", key="b"), record(data="9", key="c"))
    titles = [figure.title.partition(",")[0] for figure in training_figures(found)]
    assert list(dict.fromkeys(titles)) == ["9", "10", "²"]


def test_orders_of_magnitude_have_a_logarithmic_axis_and_a_cosine_has_none():
    site = {"cosine": 0.5, "bias": 1.0, "variance": 1.0}
    found = runs(record("feedback-direct", 128))
    found = [dataclasses.replace(run, diagnostics=[{"epoch": 1, "sites": {"0": site, "2": site}}]) for run in found]
    figures = {figure.slug: figure for figure in feedback_figures(found)}
    found_axes = {name: figures[f"feedback-{name}"].log_y for name in site}
    assert found_axes == {"cosine": False, "bias": True, "variance": True}


def test_rare_tangents_and_more_sweeps_are_dashed():
    deep: dict[str, Any] = {"depth": 12, "lr": 1e-3}
    found = runs(
        *(record("feedback-direct", 512, key=f"a{every}", every=every, fraction=1 / every) for every in (1, 4)),
        *(record("feedback-chained", 512, key=f"b{sweeps}", sweeps=sweeps, **deep) for sweeps in (1, 2)),
    )
    figures = {figure.slug: figure for figure in feedback_figures(found)}
    assert [curve.dashed for curve in figures["feedback-work"].curves] == [False, True]
    assert [curve.dashed for curve in figures["feedback-depth-12-lr-0-001"].curves] == [False, True]


def test_a_command_is_named_by_method_and_setting():
    found = runs(record("feedback-direct", 512), record("feedback-direct", 512, lr=1e-3, schedule="cosine", key="b"))
    names = {name for table in feedback_tables(found) for name, _ in table.commands}
    assert "Feedback, direct, depth 3, width 512, learning rate 0.0001" in names
    assert "Feedback, direct, depth 3, width 512, learning rate 0.001, cosine" in names


def test_the_table_of_layers_is_folded_and_has_what_was_diagnosed_in_the_papers_setting():
    found = runs(
        diagnosed(record("wperp", 128)), record("wt", 128), diagnosed(record("wperp", 128, depth=5, key="deep"))
    )
    table = layers_table(found)
    assert table.folded
    assert [row[0].text for row in table.rows] == ["W⊥, k = 10"] * 3


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59.94, "59.9 s"), (60, "1 min"), (3000, "50 min"), (3599, "60 min"), (5400, "1.5 h")]
)
def test_durations(seconds: float, shown: str):
    assert _duration(seconds) == shown
    assert _duration(seconds, signed=True) == f"+{shown}"
    assert _duration(-seconds) == f"−{shown}"


def test_a_curve_is_a_line_unless_it_is_said_to_be_dots():
    def drawn(**options: bool) -> str:
        curve = Curve("a", [1.0, 2.0], [1.0, 2.0], "wperp", **options)
        return draw(Figure("f", "F", "x", "y", (curve,))).svg

    assert drawn() == drawn(dots=False) != drawn(dots=True)
