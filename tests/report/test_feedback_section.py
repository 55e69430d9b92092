"""The section on learned feedback: what is compared with what, and that failures are not averaged away."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradguess_lab.config import TrainConfig
from gradguess_lab.report.plot import draw
from gradguess_lab.report.sections import build_sections
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.feedback_figures import feedback_figures
from gradguess_lab.tables.feedback_results import label, results_of
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table
from report.synthetic import Record, record


def runs(*records: Record) -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in records]


def seeds(method: str, train: tuple[float, ...], test: tuple[float, ...] | None = None, **config: Any) -> list[Record]:
    width = config.pop("width", 256)
    return [
        record(
            method, width, seed, key=f"{method}-{width}-{seed}-{config}", train_accuracy=a, test_accuracy=b, **config
        )
        for seed, (a, b) in enumerate(zip(train, test or train, strict=True))
    ]


def table(tables: tuple[Table, ...], slug: str) -> list[dict[str, Any]]:
    found = [t for t in tables if t.slug == slug]
    assert len(found) == 1
    return [dict(zip(found[0].columns, row, strict=True)) for row in found[0].rows]


def line(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    found = [r for r in rows if all(r[name.replace("_", " ")].text == text for name, text in wanted.items())]
    assert len(found) == 1
    return found[0]


BACKPROP = (0.88, 0.90, 0.92)  # sd 0.02


def compared(ours: tuple[float, ...], theirs: tuple[float, ...] = BACKPROP) -> Any:
    found = runs(*seeds("backprop", theirs), *seeds("feedback-direct", ours))
    rows = table(feedback_tables(found), "feedback-width")
    return line(rows, Method="Feedback, direct", Width="256")["Train against backprop"]


@pytest.mark.parametrize(
    ("ours", "shown"),
    [
        ((0.835, 0.855, 0.875), "−0.045 within"),  # t(.975, 4) √(0.02²/3 + 0.02²/3) = 0.0453
        ((0.834, 0.854, 0.874), "−0.046 below"),
        ((0.926, 0.946, 0.966), "+0.046 above"),
        ((0.9,), "0.000 one seed"),
    ],
)
def test_the_bar_is_a_two_sided_welch_test(ours, shown):
    assert compared(ours).text == shown


def test_equal_accuracies_without_spread_are_within():
    assert compared((1.0, 1.0), (1.0, 1.0)).text == "0.000 within"


def test_backpropagation_of_another_setting_is_no_reference():
    found = runs(*seeds("backprop", BACKPROP, lr=1e-3), *seeds("feedback-direct", BACKPROP))
    rows = table(feedback_tables(found), "feedback-width")
    assert line(rows, Method="Feedback, direct", Width="256")["Train against backprop"].text == "–"


def test_options_of_feedback_do_not_change_the_reference():
    found = runs(*seeds("backprop", BACKPROP), *seeds("feedback-direct", BACKPROP, every=4, fraction=0.25))
    rows = table(feedback_tables(found), "feedback-width")
    name = "Feedback, direct, tangents every 4 steps, on 0.25 of the batch"
    assert line(rows, Method=name, Width="256")["Train against backprop"].text == "0.000 within"
    assert line(rows, Method="Feedback, direct", Width="256")["Train accuracy"].text == "not run"


def test_collapse_is_named_and_wide_seeds_are_listed():
    depth = {"depth": 12, "lr": 1e-3, "width": 512}
    found = runs(
        *seeds("backprop", (1.0, 1.0, 1.0), **depth),
        *seeds("feedback-chained", (0.1, 0.1, 0.1), **depth),
        *seeds("feedback-direct", (0.2, 0.3, 0.8), **depth),
    )
    rows = table(feedback_tables(found), "feedback-depth")
    here = {"Depth": "12", "Learning_rate": "0.001"}
    chained = line(rows, Method="Feedback, chained", **here)
    assert chained["Train accuracy"].note == "chance level in every seed"
    assert line(rows, Method="Feedback, direct", **here)["Train accuracy"].note == "seeds: 0.200, 0.300, 0.800"
    short = table(feedback_tables(found), "feedback-shortfalls")
    assert [r["Method"].text for r in short[:2]] == ["Feedback, chained"] * 2
    assert short[0]["Difference"].text == "−0.900"


def test_controls_are_no_shortfalls_but_stand_beside_the_learned():
    residual = {"model": "residual", "width": 128, "depth": 12, "epochs": 20, "batch": 128, "lr": 3e-4}
    found = runs(
        *seeds("backprop", BACKPROP, **residual),
        *seeds("feedback-chained", (0.5, 0.5, 0.5), learn="never", **residual),
        *seeds("feedback-chained", (0.7, 0.7, 0.7), **residual),
    )
    rows = table(feedback_tables(found), "feedback-residual")
    assert line(rows, Method="Feedback, chained, B = 0", Depth="12")["Train accuracy"].value == pytest.approx(0.5)
    short = table(feedback_tables(found), "feedback-shortfalls")
    assert {r["Method"].text for r in short} == {"Feedback, chained"}


def test_no_learning_rate_is_chosen():
    tuned = [
        r for lr in (3e-4, 1e-3, 3e-3) for r in seeds("feedback-direct", (1.0,), lr=lr, schedule="cosine", width=512)
    ]
    rows = table(feedback_tables(runs(*tuned)), "feedback-tuned")
    assert [r["Learning rate"].text for r in rows if r["Method"].text == "Feedback, direct"] == [
        "0.0003",
        "0.001",
        "0.003",
    ]


def test_the_deviation_is_in_the_csv():
    rows = table(feedback_tables(runs(*seeds("feedback-direct", BACKPROP))), "feedback-width")
    assert line(rows, Method="Feedback, direct", Width="256")["Train sd"].value == pytest.approx(0.02)


def test_without_feedback_there_is_no_section():
    found = runs(*seeds("backprop", BACKPROP))
    assert not feedback_tables(found)
    assert not feedback_figures(found)
    assert "feedback" not in {section.slug for section in build_sections({"runs": found, "benchmarks": []})}


def test_a_quick_preset_is_shown_with_its_own_widths():
    found = runs(*(r for width in (64, 128) for r in seeds("feedback-direct", (0.5,), width=width)))
    figures = {figure.slug: figure for figure in feedback_figures(found)}
    assert list(figures["feedback-width-train"].curves[0].x) == [64.0, 128.0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"start": "random", "learn": "never"}, "Feedback, direct, fixed random B (direct feedback alignment)"),
        ({"learn": "never"}, "Feedback, direct, B = 0"),
        ({"learn": "truth"}, "Feedback, direct, B from true gradients (ceiling of the form)"),
        ({"teacher": "wt"}, "Feedback, direct, directions of Wᵀ"),
        ({"sweeps": 2, "bootstrap": 0.3}, "Feedback, direct, bootstrap anchored by tangents, 2 sweeps"),
    ],
)
def test_labels_say_what_is_unusual(change, name):
    assert label(TrainConfig(method="feedback-direct", **change)) == name


def test_a_line_is_made_of_one_configuration():
    found = runs(*seeds("feedback-direct", (0.5, 0.6)), *seeds("feedback-direct", (0.1, 0.1, 0.1), rate=1.0))
    (result,) = results_of([TrainConfig(method="feedback-direct", width=256)], found)
    assert result.ours("train_accuracy").n == 2


def test_figures_have_every_rate_at_the_largest_depth_and_the_ablations_in_order():
    depth = [
        r
        for lr in (1e-4, 1e-3)
        for method in ("backprop", "feedback-chained")
        for r in seeds(method, (0.4, 0.6), lr=lr, depth=12, width=512)
    ]
    ablations = [
        *seeds("feedback-direct", (0.7, 0.8)),
        *seeds("feedback-direct", (0.8, 0.9), learn="truth"),
        *seeds("feedback-chained", (0.4, 0.5), learn="never"),
    ]
    figures = {figure.slug: figure for figure in feedback_figures(runs(*depth, *ablations))}
    assert {"feedback-depth-12-lr-0-0001", "feedback-depth-12-lr-0-001", "feedback-ablations"} <= set(figures)
    assert [curve.style for curve in figures["feedback-depth-12-lr-0-001"].curves] == ["backprop", "feedback-chained"]
    assert figures["feedback-ablations"].y_names == (
        "Feedback, direct, B from true gradients (ceiling of the form)",
        "Feedback, direct",
        "Feedback, chained, B = 0",
    )
    assert "feedback-ablations" in figures
    assert draw(figures["feedback-ablations"]).png[:4] == b"\x89PNG"


def test_accuracy_against_work_and_tangents():
    history = [{"epoch": 10, "train_accuracy": 0.5, "test_accuracy": 0.4}]
    rare = {"every": 4, "fraction": 0.25}
    found = [
        *runs(*seeds("backprop", (1.0,), width=512), *seeds("feedback-direct", (1.0,), width=512)),
        *runs(*seeds("feedback-direct", (1.0,), width=512, **rare)),
    ]
    found = [dataclasses.replace(run, history=history) for run in found]
    figures = {figure.slug: figure for figure in feedback_figures(found)}
    work = {curve.label: list(curve.x) for curve in figures["feedback-work"].curves}
    assert list(work.values()) == [[30.0], [30.0], [20.625]]  # three passes, three, and 2 + 1/16
    tangents = figures["feedback-tangents"].curves
    assert [list(curve.x) for curve in tangents] == [[10.0], [0.625]]  # backpropagation has none
    assert all(list(curve.y) == [0.4] for curve in tangents)


def test_quality_over_training_is_the_mean_over_hidden_layers():
    def looked_at(epoch: int, *cosines: float) -> dict[str, Any]:
        return {"epoch": epoch, "sites": {str(i): {"cosine": c, "bias": 1.0} for i, c in enumerate(cosines)}}

    found = runs(*seeds("feedback-direct", (1.0, 1.0), width=128))
    entries = ([looked_at(25, 0.2, 0.4, 1.0)], [looked_at(25, 0.4, 0.6, 1.0), looked_at(50, 0.5, 0.5, 1.0)])
    found = [dataclasses.replace(run, diagnostics=entry) for run, entry in zip(found, entries, strict=True)]
    figures = {figure.slug: figure for figure in feedback_figures(found)}
    (curve,) = figures["feedback-cosine"].curves
    assert list(curve.x) == [25, 50]
    assert list(curve.y) == pytest.approx([0.4, 0.5])
    assert "feedback-variance" not in figures  # nothing was measured
