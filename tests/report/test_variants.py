"""Which of the scripts' ways close a gap, and how the numbers are counted."""

from __future__ import annotations

from typing import Any

from gradguess_lab.paper_numbers import BIAS_VARIANCE, DISTINCT, ENTRIES
from gradguess_lab.tables.networks import networks_table
from gradguess_lab.tables.over_training import over_training_figures
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table
from gradguess_lab.tables.tally import tally_table
from gradguess_lab.tables.variants import explanations, overlap_table, variants_table
from report.synthetic import EPOCHS, Record, diagnosed, record


def runs(*records: Record) -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in records]


def seeds(method: str, accuracy: float, width: int = 128, **config: Any) -> list[Record]:
    return [record(method, width, s, train_accuracy=accuracy + 0.002 * (-1) ** s, **config) for s in range(4)]


def bias(value: float, last_batch: float, method: str = "wt", **config: Any) -> list[Record]:
    wiggle = [1 + 0.02 * (-1) ** s for s in range(4)]
    plain = seeds(method, 0.312, **config)
    values = zip(plain, wiggle, strict=True)
    return [diagnosed(r, {"bias": w * last_batch}, bias=w * value, variance=1.5e-4 * w) for r, w in values]


def line(table: Table, quantity: str, method: str = "Wᵀ") -> dict[str, Any]:
    found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    found = [row for row in found if (row["Method"].text, row["Quantity"].text) == (method, quantity)]
    assert len(found) == 1
    return found[0]


def counts(found: list[Run]) -> dict[str, str]:
    return {row[0].text: row[1].text for row in tally_table(found).rows}


def test_a_toggle_that_closes_the_gap_is_named():
    found = runs(*seeds("wt", 0.35), *seeds("wt", 0.312, script="mask"))
    one = line(variants_table(found), "Train accuracy")
    assert one["Mask with biases"].verdict == "holds"
    assert one["Closed by"].text == "Mask with biases, All together"
    assert one["Ours"].text.startswith("0.350")


def test_a_toggle_that_does_not_close_it_leaves_it_unexplained():
    found = runs(*seeds("wt", 0.35), *seeds("wt", 0.34, script="mask"))
    one = line(variants_table(found), "Train accuracy")
    assert one["Mask with biases"].verdict == "differs"
    assert one["Closed by"].text == "nothing"
    assert counts(found)["… of them that remain"] == counts(found)["differ"] != "0"


def test_the_last_batch_and_the_accuracy_before_the_epoch_need_no_other_run():
    found = runs(*bias(1.2e-4, last_batch=2.75e-4))
    one = line(variants_table(found), "Bias, layer 1")
    assert one["Closed by"].text == "Last batch"
    before = [{**r, "metrics": {**r["metrics"], "train_accuracy_before_last": 0.312}} for r in seeds("wt", 0.35)]
    before[0]["metrics"]["train_accuracy_before_last"] = 0.313
    assert line(variants_table(runs(*before)), "Train accuracy")["Closed by"].text == "Accuracy before the epoch"


def test_all_together_takes_the_most_toggles_and_measures_as_the_scripts_do():
    bottom = bias(1e-4, 1e-4, "wperp-bottom")
    alone = [*bias(1.5e-4, 1.5e-4, "wperp-bottom", script="mask"), *bias(1e-4, 1e-4, "wperp-bottom", script="bottom")]
    both = bias(1e-4, 2.83e-4, "wperp-bottom", script="mask,bottom")
    one = line(variants_table(runs(*bottom, *alone, *both)), "Bias, layer 1", "W⊥-bottom, k = 10")
    assert one["Closed by"].text == "All together"


def test_a_number_that_holds_is_not_among_them():
    assert explanations(runs(*seeds("backprop", 0.709))) == []


def test_a_way_that_moves_away_explains_nothing():
    """Three seeds have a wide interval: it reaches the paper's number, which the mean has moved away from."""
    scripts = [record("wt", seed=s, script="mask", train_accuracy=a) for s, a in enumerate((0.36, 0.38, 0.34))]
    one = line(variants_table(runs(*seeds("wt", 0.35), *scripts)), "Train accuracy")
    assert one["Mask with biases"].verdict == "differs"
    assert one["Closed by"].text == "nothing"


def test_an_interval_wider_than_that_of_the_main_line_explains_nothing():
    scripts = [record("wt", seed=s, script="mask", train_accuracy=a) for s, a in enumerate((0.34, 0.36, 0.32))]
    found = runs(*seeds("wt", 0.35), *scripts)  # nearer to 0.312, and 0.028 from it
    assert line(variants_table(found), "Train accuracy")["Closed by"].text == "nothing"
    assert counts(found)["… of them explained by a variant"] == "0"


def test_one_run_is_never_an_explanation():
    found = runs(*seeds("wt", 0.35), record("wt", script="mask", train_accuracy=0.312))
    assert line(variants_table(found), "Train accuracy")["Closed by"].text == "nothing"


def test_a_shared_basis_does_not_explain_the_definition():
    """Only the scripts' ways count: the shared basis is ours."""
    found = runs(*seeds("wperp", 0.5, 512), *seeds("wperp", 0.581, 512, solver="shared"))
    assert not line(variants_table(found), "Train accuracy", "W⊥, k = 10")["Closed by"].text.startswith("shared")
    assert counts(found)["… of them explained by a variant"] == "0"


def test_epochs_that_agree_are_named():
    found = bias(1.2e-4, 1.2e-4)
    for result in found:
        for row in result["diagnostics"]:
            if row["epoch"] == 30:
                row["sites"]["0"] = {**row["sites"]["0"], "bias": 2.75e-4 + 1e-6 * result["config"]["seed"]}
    assert line(variants_table(runs(*found)), "Bias, layer 1")["Epochs that agree"].text == "30"


def test_the_tally_counts_each_published_number_once():
    found = runs(*seeds("wt", 0.35), *seeds("wt", 0.312, script="mask"), *seeds("backprop", 0.709))
    table = counts(found)
    assert sum((e.method, e.width, e.quantity) == ("wt", 128, "train_accuracy") for e in ENTRIES) == 3
    assert sum((e.method, e.width, e.quantity) == ("wt", 128, "train_accuracy") for e in DISTINCT) == 1
    assert (table["judged"], table["hold"], table["differ"]) == ("3", "1", "2")  # one of them a test accuracy
    assert table["… of them explained by a variant"] == "1"
    assert table["… expected by chance alone, if all were true (5 %)"] == "0.2"
    others = ("zero to rounding", "one run, not judged", "not compared (training times)", "not run")
    assert int(table["judged"]) + sum(int(table[name]) for name in others) == len(DISTINCT)


def test_overlap_is_shown_squared_too():
    table = overlap_table(runs(diagnosed(record())))
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["Squared"].value == first["Overlap"].value ** 2 < first["Overlap"].value
    assert overlap_table([]) is None


def test_figures_over_training_have_the_paper_s_values_as_lines():
    found = runs(*bias(1e-4, 1e-4), *bias(2e-5, 2e-5, "wperp"), *bias(3e-5, 3e-5, "wperp-bottom"))
    figures = {figure.slug: figure for figure in over_training_figures(found)}
    assert set(figures) == {f"over-training-{name}" for name in ("variance", "bias", "gradient-norm")}
    shown = figures["over-training-bias"]
    assert {tuple(curve.y) for curve in shown.curves if curve.dashed} == {(v, v) for v in (2.75e-4, 2.83e-4, 2.86e-5)}
    assert shown.x_names == tuple("" if epoch == 200 else str(epoch) for epoch in EPOCHS)  # too close to 300
    assert shown.x_ticks[0] > 0  # the axis is logarithmic
    assert shown.log_x
    assert shown.log_y
    assert not [curve for curve in figures["over-training-gradient-norm"].curves if curve.dashed]


def test_figures_over_training_are_of_the_definition():
    shared = bias(9e-5, 9e-5, "wperp", solver="shared")
    figure = next(f for f in over_training_figures(runs(*shared, *bias(2e-5, 2e-5, "wperp"))) if "bias" in f.slug)
    (ours,) = [curve for curve in figure.curves if not curve.dashed]
    assert max(ours.y) < 3e-5
    assert "each sample's own subspace" in figure.caption


def test_guesses_on_networks_that_others_have_trained():
    """The paper's value is marked at the network and the epoch that agree with it, and nowhere else."""
    entry = next(e for e in BIAS_VARIANCE if (e.method, e.quantity) == ("wt", "variance"))

    def seen(seed: int, epoch: int) -> dict:
        near = entry.value * (1 + 0.01 * seed)
        value = near if epoch == 100 else near / 50
        return {"0": {"bias": 1e-9, "variance": value, "last_bias": 1e-9, "last_variance": near / 70}}

    records = []
    for seed in range(3):
        one = diagnosed(record("backprop", seed=seed))
        rows = [row | {"sites": {}, "others": {"wt": seen(seed, row["epoch"])}} for row in one["diagnostics"]]
        records.append(one | {"diagnostics": [{k: v for k, v in row.items() if k != "last_batch"} for row in rows]})
    table = networks_table(runs(*records))
    assert table is not None
    marked = [
        (cells[0].text, cells[1].text, cells[4].text, column)
        for cells in table.rows
        for column, cell in zip(table.columns, cells, strict=True)
        if cell.verdict == "holds"
    ]
    assert marked == [("Wᵀ", "Variance", "first 512", "Epoch 100")]
    assert networks_table([]) is None
