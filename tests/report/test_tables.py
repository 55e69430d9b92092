"""Which runs a line is made from, and what it then says."""

from __future__ import annotations

from typing import Any

import pytest

from gradguess_lab.paper_numbers import CHOICE_OF_K, SCALING
from gradguess_lab.tables.lines import compare
from gradguess_lab.tables.paper import choice_of_k_table, scaling_matrix, scaling_table
from gradguess_lab.tables.table import Cell, Table
from report.synthetic import paper_records, record, runs


def row(table: Table, **wanted: Any) -> dict[str, Cell]:
    """The one row whose cells have these texts."""
    found = [dict(zip(table.columns, cells, strict=True)) for cells in table.rows]
    found = [r for r in found if all(r[name.replace("_", " ")].text == text for name, text in wanted.items())]
    assert len(found) == 1
    return found[0]


def test_a_line_has_mean_deviation_seeds_difference_and_verdict():
    table = choice_of_k_table(runs(*(record("wt", 128, s, train_accuracy=a) for s, a in enumerate((0.30, 0.32)))))
    line = row(table, Method="Wᵀ")
    assert line["Paper"].value == 0.312
    assert line["Ours"].value == pytest.approx(0.31)
    assert line["± sd"].value == pytest.approx(0.02 / 2**0.5)
    assert line["Seeds"].value == 2
    assert line["Difference"].value == pytest.approx(-0.002)
    assert line["Verdict"].verdict == "holds"


def test_one_seed_has_no_deviation():
    line = row(choice_of_k_table(runs(record("wt", 128, train_accuracy=0.5))), Method="Wᵀ")
    assert line["± sd"].value is None
    assert line["Verdict"].verdict == "one run, not judged"


def test_missing_runs_are_not_run_and_say_how_to_run_them():
    table = choice_of_k_table([])
    assert {r[table.columns.index("Verdict")].text for r in table.rows} == {"not run"}
    assert not table.ran
    assert dict(table.commands)["W⊥, k = 25, width 128"] == (
        "gradguess train --data mnist1d --method wperp --width 128 --depth 3 --epochs 300 --lr 0.0001 --batch 512 "
        "--seed 0 --k 25 --solver subspace"
    )


@pytest.mark.parametrize(
    "other",
    [{"epochs": 5}, {"lr": 1e-3}, {"batch": 64}, {"depth": 6}, {"data": "digits"}, {"tangents": 10}, {"bias": True}],
)
def test_a_run_in_another_setting_is_not_held_against_the_paper(other: dict[str, Any]):
    assert not choice_of_k_table(runs(record("wt", 128, **other))).ran


def test_the_definition_comes_first_whatever_has_most_seeds():
    shared = [record(solver="shared", seed=seed) for seed in range(3)]
    ways = [*shared, record(), record(seed=1), record(solver="svd", device="cuda:0")]
    lines = [line for line in compare(CHOICE_OF_K, runs(*ways)) if line.ours and line.entry.k == 10]
    assert [(line.computed_by, line.ours.n, line.main) for line in lines] == [
        ("each sample's own subspace", 2, True),
        ("each sample's own subspace, by SVD · cuda", 1, False),
        ("shared basis", 3, False),
    ]


def test_the_same_seed_twice_counts_once():
    twice = runs(record("wt", 128, key="a"), record("wt", 128, key="b"))
    assert row(choice_of_k_table(twice), Method="Wᵀ")["Seeds"].value == 1


@pytest.mark.parametrize("k", ["rank", 128, 400])
def test_rank_is_any_k_that_keeps_everything(k: int | str):
    table = choice_of_k_table(runs(record(k=k)))
    assert row(table, Method="W⊥, k = rank")["Ours"].value == 0.3
    assert row(table, Method="W⊥, k = 10")["Ours"].value is None


def test_the_matrix_has_the_paper_s_form():
    table = scaling_matrix(runs(*paper_records()))
    assert [r[0].text for r in table.rows] == ["64", "128", "256", "512"]
    assert len(table.columns) == 6
    assert table.rows[3][4].note == "paper 0.581"
    assert {cell.verdict for r in table.rows for cell in r[1:]} == {"holds"}


def test_all_entries_of_a_perfect_repetition_hold():
    perfect = [
        record(entry.method, entry.width, seed, train_accuracy=entry.value, k=entry.k or 10)
        for entry in SCALING
        for seed in range(2)
    ]
    table = scaling_table(runs(*perfect))
    assert {r[table.columns.index("Verdict")].text for r in table.rows} == {"holds"}
