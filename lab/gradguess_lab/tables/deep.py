"""Deep networks: one table per network, data set and number of epochs, with every method that was run on it."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import METHODS, VARIANTS, method_label, options_of, settings_of
from gradguess_lab.tables.averages import mean_cell
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run, Variant, setting, variants
from gradguess_lab.tables.table import Cell, Table, number, text

BASE = "backprop"
_TASK = ("model", "data", "width", "depth", "epochs")
_COLUMNS = ("Method", "Pieces", "Rate", "Train", "Test", "Best epoch", "Difference", "Seeds")


def deep_tables(runs: Sequence[Run]) -> list[Table]:
    """The tables by network, longest training first."""
    tasks: dict[tuple[str, ...], list[Variant]] = {}
    for variant in variants(runs):
        tasks.setdefault(tuple(str(setting(variant.first, name)) for name in _TASK), []).append(variant)
    order = sorted(tasks, key=lambda task: (*task[:2], -int(task[3]), -int(task[4])))
    return [_table(task, tasks[task]) for task in order]


def _table(task: tuple[str, ...], found: Sequence[Variant]) -> Table:
    """Backpropagation first, then the others from the best to the worst."""
    model, data, width, depth, epochs = task
    less = data == "shakespeare"
    quantity = "bits" if less else "accuracy"
    means = [(variant, mean) for variant in found if (mean := Summary.of(variant.values(f"test_{quantity}")))]
    means.sort(key=lambda item: (item[0].first.method != BASE, item[1].mean if less else -item[1].mean))
    base = means[0][1] if means and means[0][0].first.method == BASE else None
    rows = [_row(variant, mean, base, quantity) for variant, mean in means]
    what = "Bits per character (less is better)" if less else "Accuracy"
    caption = (
        f"{what}, mean ± standard deviation over seeds. Each rate that was run has a line; not all methods were run "
        "with several. Difference: of the last epoch's test result to that of backpropagation's best line."
    )
    title = f"{model} on {data}: depth {depth}, width {width}, {epochs} epochs"
    return Table(f"deep-{model}-{data}-{depth}-{epochs}", title, _COLUMNS, tuple(rows), caption)


def _row(variant: Variant, mean: Summary, base: Summary | None, quantity: str) -> tuple[Cell, ...]:
    pieces = str(setting(variant.first, "sites"))
    pick = min if quantity == "bits" else max
    seen = [[row[f"test_{quantity}"] for row in run.history if f"test_{quantity}" in row] for run in variant.runs]
    return (
        text(_name(variant)),
        text(pieces if pieces.isdecimal() else "–"),
        number(setting(variant.first, "lr"), "g"),
        mean_cell(Summary.of(variant.values(f"train_{quantity}"))),
        mean_cell(mean),
        mean_cell(Summary.of([pick(values) for values in seen if values])),
        text("–") if base is None or mean is base else number(mean.mean - base.mean, ".4f", signed=True),
        number(len(variant.runs), "d"),
    )


def _name(variant: Variant) -> str:
    """The label of the method, or of the variant of it that these settings are; with the students' rate if unusual."""
    config, method = variant.first.config, variant.first.method
    fitting = [name for name in (*METHODS, *VARIANTS) if settings_of(name).items() <= config.items()]
    label = method_label(max(fitting, key=lambda name: len(settings_of(name)), default=method))
    rate = setting(variant.first, "student_lr")
    unusual = "student_lr" in options_of(method) and rate != TrainConfig.student_lr
    return f"{label}, their rate {rate:g}" if unusual else label
