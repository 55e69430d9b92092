"""The section on learned feedback: what is compared with what, and that failures are not averaged away."""

from __future__ import annotations

from typing import Any

import pytest

from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.table import Table
from report.synthetic import Record, record, runs


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


def test_backpropagation_of_another_setting_is_no_reference():
    found = runs(*seeds("backprop", BACKPROP, lr=1e-3), *seeds("feedback-direct", BACKPROP))
    rows = table(feedback_tables(found), "feedback-width")
    assert line(rows, Method="Feedback, direct", Width="256")["Train against backprop"].text == "–"


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
