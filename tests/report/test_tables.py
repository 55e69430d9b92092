"""Which runs a line is made from, and what it then says."""

from __future__ import annotations

from typing import Any

import pytest

from gradguess_lab.paper_numbers import CHOICE_OF_K, NEWTON_SCHULZ, SCALING
from gradguess_lab.tables.curves import overlap_figures, scaling_figure, training_figures
from gradguess_lab.tables.layers import layers_table
from gradguess_lab.tables.lines import compare
from gradguess_lab.tables.paper import choice_of_k_table, scaling_matrix, scaling_table
from gradguess_lab.tables.runs import Run, command
from gradguess_lab.tables.table import Cell, Table
from report.synthetic import Record, diagnosed, paper_records, record


def runs(*records: Record) -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in records]


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


def test_the_nearest_set_comes_before_the_placed_threshold():
    ways = [record("wperp-ns", seed=seed, threshold="placed", key=f"p{seed}") for seed in range(2)]
    lines = [line for line in compare(NEWTON_SCHULZ, runs(record("wperp-ns"), *ways)) if line.ours]
    by = [line.computed_by for line in lines if line.entry.quantity == "train_accuracy"]
    assert by == ["nearest set", "threshold placed"]


def test_an_older_run_of_newton_schulz_took_the_nearest_set():
    old = record("wperp-ns")
    del old["config"]["threshold"], old["config"]["script"]
    lines = [line for line in compare(NEWTON_SCHULZ, runs(old)) if line.ours]
    assert {line.computed_by for line in lines} == {"nearest set"}


def test_what_is_done_as_in_the_scripts_is_no_line_of_the_paper():
    assert not choice_of_k_table(runs(record("wt", script="mask"))).ran


def test_an_unusual_option_is_named():
    found = compare(CHOICE_OF_K, runs(record(refresh=200, solver="shared")))
    assert [line.computed_by for line in found if line.ours] == ["shared basis · refresh 200"]


def test_options_that_a_method_does_not_read_make_no_difference():
    found = [line for line in compare(SCALING, runs(record("wt", 64, k=3), record("wt", 64, 1, k=7))) if line.ours]
    assert [line.ours.n for line in found] == [2]


def test_the_same_seed_twice_counts_once():
    twice = runs(record("wt", 128, key="a"), record("wt", 128, key="b"))
    assert row(choice_of_k_table(twice), Method="Wᵀ")["Seeds"].value == 1


@pytest.mark.parametrize("k", ["rank", 128, 400])
def test_rank_is_any_k_that_keeps_everything(k: int | str):
    table = choice_of_k_table(runs(record(k=k)))
    assert row(table, Method="W⊥, k = rank")["Ours"].value == 0.3
    assert row(table, Method="W⊥, k = 10")["Ours"].value is None


def test_columns_that_never_change_are_hidden_but_kept():
    table = choice_of_k_table(runs(record("wt", 128)))
    assert {table.columns[i] for i in table.hidden} == {"Width", "Quantity", "Computed by"}


def test_the_matrix_has_the_paper_s_form():
    table = scaling_matrix(runs(*paper_records()))
    assert [r[0].text for r in table.rows] == ["64", "128", "256", "512"]
    assert len(table.columns) == 6
    assert table.rows[3][4].note == "paper 0.581"
    assert {cell.verdict for r in table.rows for cell in r[1:]} == {"holds"}


def test_the_shared_basis_has_a_column_of_its_own_and_never_stands_in_unsaid():
    shared = [record(width=width, solver="shared", train_accuracy=0.4) for width in (64, 128)]
    table = scaling_matrix(runs(record(), *shared))
    cells = {
        width: dict(zip(table.columns, row, strict=True)) for width, row in zip((64, 128), table.rows, strict=False)
    }
    assert cells[128]["W⊥, k = 10"].text == "0.300"
    assert cells[128]["W⊥, shared basis, k = 10"].text == "0.400"
    assert cells[64]["W⊥, k = 10"].note == "shared basis; paper 0.268"
    figure = scaling_figure(runs(record(), *shared))
    assert [curve.style for curve in figure.curves if curve.label] == ["wperp", "wperp-shared"]


def test_all_entries_of_a_perfect_repetition_hold():
    perfect = [
        record(entry.method, entry.width, seed, train_accuracy=entry.value, k=entry.k or 10)
        for entry in SCALING
        for seed in range(2)
    ]
    table = scaling_table(runs(*perfect))
    assert {r[table.columns.index("Verdict")].text for r in table.rows} == {"holds"}


def test_every_layer_is_listed():
    table = layers_table(runs(diagnosed(record("wt", 128), bias=0.5)))
    assert [r[table.columns.index("Bias")].value for r in table.rows] == [0.5, 1e-4, 1e-4]


def test_the_last_diagnosed_epoch_counts():
    result = record("wt", 128)
    result["diagnostics"] = [{"epoch": epoch, "sites": {"0": {"bias": float(epoch)}}} for epoch in (0, 300, 10)]
    table = layers_table(runs(result))
    assert table.rows[0][table.columns.index("Bias")].value == 300.0


def test_scaling_figure_has_ours_and_the_paper_s_curves():
    figure = scaling_figure(runs(*paper_records()))
    assert [curve.label for curve in figure.curves if curve.label] == [
        *("Weight perturbation", "Activation perturbation", "Wᵀ", "W⊥, k = 10", "Backpropagation")
    ]
    assert sum(curve.dashed for curve in figure.curves) == 5
    assert figure.x_ticks == (64, 128, 256, 512)
    assert scaling_figure([]) is None


def test_overlap_figure_has_layers_ranks_and_the_line_at_ten():
    (figure,) = overlap_figures(runs(diagnosed(record()), diagnosed(record(seed=1))))
    assert figure.slug == "overlap-128"
    assert [curve.label for curve in figure.curves] == [
        f"Layer {i}, rank = {r}" for i, r in ((1, 64), (2, 96), (3, 10))
    ]
    assert figure.mark == (10.0, "k = 10")
    assert len(figure.curves[0].x) == 128
    assert overlap_figures(runs(record())) == []


def test_training_figures_are_grouped_by_shape():
    figures = training_figures(runs(record("wt", 64), record("wt", 64, 1), record("wt", 128)))
    assert len(figures) == 8
    assert [len(figure.curves) for figure in figures] == [1] * 8
    assert figures[0].curves[0].low is not None
    assert figures[0].slug == "training-mnist1d-mlp-3-64-train-loss"


def test_names_that_differ_in_signs_only_get_figures_of_their_own():
    slugs = [figure.slug for figure in training_figures(runs(record(data="a/b"), record(data="a-b", key="b")))]
    assert len(set(slugs)) == len(slugs) == 8


def test_a_long_name_is_cut():
    figure = training_figures(runs(record(data="a" * 400)))[0]
    assert len(figure.slug) < 120


def test_a_slug_cannot_leave_its_folder():
    figure = training_figures(runs(record(data="../../etc/x")))[0]
    assert figure.slug == "training-etc-x-mlp-3-128-train-loss"
    with pytest.raises(ValueError, match="lower-case letters"):
        Table("../x", "x", (), ())


def test_a_command_quotes_what_a_shell_would_read():
    assert command({"method": "wt", "data": "a b; rm"}) == "gradguess train --data 'a b; rm' --method wt"
