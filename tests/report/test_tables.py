"""Which runs a line is made from, and what it then says."""

from __future__ import annotations

import csv
import io
from functools import partial
from typing import Any

import pytest

from gradguess_lab.paper_numbers import CHOICE_OF_K, DISTINCT, SCALING
from gradguess_lab.tables.beyond import deep_tables
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.paper import compare, published, scaling_matrix
from gradguess_lab.tables.runs import Run, in_paper_setting
from gradguess_lab.tables.stored import QUANTITY, beside_stored, said, stored_runs
from gradguess_lab.tables.table import Cell, Table
from gradguess_lab.tables.tally import tally, variants_table
from report.synthetic import Record, diagnosed, paper_records, record, runs

choice_of_k = partial(published, "choice-of-k")


def row(table: Table, **wanted: str) -> dict[str, Cell]:
    """The one row whose cells have these texts."""
    (found,) = [one for one in table.cells if all(one[name].text == text for name, text in wanted.items())]
    return found


def seeds(method: str, accuracy: float, width: int = 128, **config: Any) -> list[Record]:
    return [record(method, width, s, train_accuracy=accuracy + 0.002 * (-1) ** s, **config) for s in range(4)]


# --- the paper ---


def test_a_line_has_mean_deviation_seeds_difference_and_verdict():
    two = (record("wt", 128, s, train_accuracy=a) for s, a in enumerate((0.30, 0.32)))
    line = row(choice_of_k(runs(*two, record("wt", 128, 1, key="again"))), Method="Wᵀ")  # a seed twice counts once
    assert line["Paper"].value == 0.312
    assert line["Ours"].value == pytest.approx(0.31)
    assert line["± sd"].value == pytest.approx(0.02 / 2**0.5)
    assert line["Seeds"].value == 2
    assert line["Difference"].value == pytest.approx(-0.002)
    assert line["Verdict"].verdict == "holds"


@pytest.mark.parametrize(
    "other",
    [{"epochs": 5}, {"lr": 1e-3}, {"batch": 64}, {"depth": 6}, {"data": "digits"}, {"tangents": 10}, {"bias": True}],
)
def test_a_run_in_another_setting_is_not_held_against_the_paper(other: dict[str, Any]):
    assert not choice_of_k(runs(record("wt", 128, **other))).ran


def test_the_definition_comes_first_whatever_has_most_seeds():
    shared = [record(solver="shared", seed=seed) for seed in range(3)]
    ways = [*shared, record(), record(seed=1), record(solver="svd", device="cuda:0")]
    lines = [line for line in compare(CHOICE_OF_K, runs(*ways)) if line.ours and line.entry.k == 10]
    assert [(line.way, line.ours.n, line.main) for line in lines] == [
        ("each sample's own subspace", 2, True),
        ("each sample's own subspace, by SVD · cuda", 1, False),
        ("shared basis", 3, False),
    ]


@pytest.mark.parametrize("k", ["rank", 128, 400])
def test_rank_is_any_k_that_keeps_everything(k: int | str):
    table = choice_of_k(runs(record(k=k)))
    assert row(table, Method="W⊥, k = rank")["Ours"].value == 0.3
    assert row(table, Method="W⊥, k = 10")["Ours"].value is None


def test_all_entries_of_a_perfect_repetition_hold():
    perfect = [
        record(entry.method, entry.width, seed, train_accuracy=entry.value, k=entry.k or 10)
        for entry in SCALING
        for seed in range(2)
    ]
    matrix = scaling_matrix(runs(*perfect))
    assert {cell.verdict for one in matrix.cells for name, cell in one.items() if name != "Width"} == {"holds"}
    assert matrix.cells[3]["W⊥, k = 10"].note == "paper 0.581"


# --- the authors' scripts ---


def closed(quantity: str, *records: Record, method: str = "Wᵀ") -> str:
    return row(variants_table(runs(*records)), Quantity=quantity, Method=method)["Closed by"].text


def bias(value: float, last_batch: float, method: str = "wt", **config: Any) -> list[Record]:
    wiggle = [1 + 0.02 * (-1) ** s for s in range(4)]
    values = zip(seeds(method, 0.312, **config), wiggle, strict=True)
    return [diagnosed(r, {"bias": w * last_batch}, bias=w * value, variance=1.5e-4 * w) for r, w in values]


def test_a_way_that_closes_the_gap_is_named_and_no_other():
    off = seeds("wt", 0.35)
    assert closed("Train accuracy", *off, *seeds("wt", 0.312, script="mask")) == "Mask with biases, All together"
    assert closed("Train accuracy", *off, *seeds("wt", 0.34, script="mask")) == "nothing"
    moved_away = [record("wt", seed=s, script="mask", train_accuracy=a) for s, a in enumerate((0.36, 0.38, 0.34))]
    assert closed("Train accuracy", *off, *moved_away) == "nothing"  # although three seeds have a wide interval


def test_what_is_measured_in_another_way_needs_no_other_run():
    assert closed("Bias, layer 1", *bias(1.2e-4, last_batch=2.75e-4)) == "Last batch"
    before = [{**r, "metrics": {**r["metrics"], "train_accuracy_before_last": 0.312}} for r in seeds("wt", 0.35)]
    before[0]["metrics"]["train_accuracy_before_last"] = 0.313
    assert closed("Train accuracy", *before) == "Accuracy before the epoch"


def test_all_together_takes_the_most_ways_and_measures_as_the_scripts_do():
    bottom = bias(1e-4, 1e-4, "wperp-bottom")
    alone = [*bias(1.5e-4, 1.5e-4, "wperp-bottom", script="mask"), *bias(1e-4, 1e-4, "wperp-bottom", script="bottom")]
    both = bias(1e-4, 2.83e-4, "wperp-bottom", script="mask,bottom")
    assert closed("Bias, layer 1", *bottom, *alone, *both, method="W⊥-bottom, k = 10") == "All together"


def test_the_tally_counts_each_published_number_once():
    found = tally(runs(*seeds("wt", 0.35), *seeds("wt", 0.312, script="mask"), *seeds("backprop", 0.709)))
    assert (found["judged"], found["holds"], found["differs"]) == (3, 1, 2)  # one of them a test accuracy
    assert found["explained"] == 1
    others = ("zero to rounding", "one run, not judged", "not compared", "not run")
    assert found["judged"] + sum(found[name] for name in others) == len(DISTINCT)


# --- a quick run beside the stored seeds ---


def quick(more: float) -> list[Run]:
    """Runs on another device, as a quick preset has them, whose training accuracy is a stored seed's plus so much."""
    found = {}
    for run in stored_runs():
        shared = run["method"] != "wperp" or run["solver"] == "shared"
        if run["seed"] == 0 and run["width"] == 128 and in_paper_setting(run) and not run["script"] and shared:
            found[run["method"], run["k"]] = {**run, "key": f"new {run['key']}", "device": "mps"}
            found[run["method"], run["k"]][QUANTITY] += more
    return list(found.values())


def test_a_quick_run_is_judged_by_the_stored_seeds():
    for more, expected in ((0.0, "holds"), (-0.2, "differs")):
        table = beside_stored(quick(more))
        assert len(table) >= 10
        words = said([{"key": run["key"], "config": run, "metrics": {QUANTITY: run[QUANTITY]}} for run in quick(more)])
        assert f"Of {len(table)} in the paper's setting {len(table) if expected == 'holds' else 0} have" in words
    assert beside_stored(stored_runs()) == []
    assert beside_stored([{**quick(0.0)[0], "epochs": 3}]) == []


# --- learned feedback, deep networks ---


def taught(method: str, *accuracies: float, experiment: str = "feedback-width", **config: Any) -> list[Record]:
    return [
        record(method, config.get("width", 256), seed, key=f"{method}-{seed}-{config}", train_accuracy=a,
               test_accuracy=a, experiments=[experiment], **{k: v for k, v in config.items() if k != "width"})
        for seed, a in enumerate(accuracies)
    ]  # fmt: skip


def lines(slug: str, *records: Record) -> Table:
    (found,) = [table for table in feedback_tables(runs(*records)) if table.slug == slug]
    return found


@pytest.mark.parametrize(
    ("ours", "shown"),
    [
        ((0.835, 0.855, 0.875), "−0.045 within"),  # t(.975, 4) √(0.02²/3 + 0.02²/3) = 0.0453
        ((0.834, 0.854, 0.874), "−0.046 below"),
        ((0.926, 0.946, 0.966), "+0.046 above"),
        ((0.9,), "0.000 one seed"),
    ],
)
def test_feedback_is_held_against_backpropagation_by_a_two_sided_welch_test(ours: tuple[float, ...], shown: str):
    base = taught("backprop", 0.88, 0.90, 0.92)
    found = row(lines("feedback-width", *base, *taught("feedback-direct", *ours)), Method="Feedback, direct")
    assert found["Train against backprop"].text == shown
    other = taught("backprop", 0.88, 0.90, 0.92, lr=1e-3)
    found = row(lines("feedback-width", *other, *taught("feedback-direct", *ours)), Method="Feedback, direct")
    assert found["Train against backprop"].text == "–"


def test_deep_networks_stand_in_order_beside_the_best_backpropagation():
    def made(test: float, best: float, method: str, seed: int = 0, **config: Any) -> Record:
        one = record(method, 64, seed, model="charformer", data="shakespeare", more={"test_bits": test}, **config)
        return {**one, "history": [{"epoch": 1, "test_bits": best}]}

    found = [
        made(2.6, 2.6, "students-chained"),
        made(2.4, 2.4, "students", sites="4"),
        made(2.2, 2.2, "students", sites="4", seed=1),
        made(2.5, 2.1, "backprop"),
        made(2.7, 2.7, "backprop", lr=0.2),
        made(3.0, 3.0, "backprop", epochs=2),
    ]
    long, short = deep_tables(runs(*found))
    assert [one["Method"].text for one in long.cells] == ["Backpropagation"] * 2 + ["Students", "Students, chained"]
    assert [one["Test"].text for one in long.cells] == ["2.500", "2.700", "2.300 ± 0.141", "2.600"]
    assert (long.cells[0]["Best epoch"].value, long.cells[2]["Pieces"].text, long.cells[2]["Seeds"].value) == (
        2.1,
        "4",
        2,
    )
    assert len(short.rows) == 1


# --- export ---


def test_csv_keeps_every_number_and_runs_no_formula():
    table = published("scaling", runs(*paper_records()))
    header, *rows = csv.reader(io.StringIO(table.csv()))
    assert (header, len(rows)) == (list(table.cells[0]), 20)
    for read, cells in zip(rows, table.cells, strict=True):
        for got, cell in zip(read, cells.values(), strict=True):
            assert (float(got) if isinstance(cell.value, int | float) else got) == (cell.value or "")
    evil = Table("t", "t", [{"a": "=HYPERLINK(1)", "b": -1.5}, {"a": None, "b": float("nan")}])
    assert list(csv.reader(io.StringIO(evil.csv()))) == [["a", "b"], ["'=HYPERLINK(1)", "-1.5"], ["", "nan"]]
