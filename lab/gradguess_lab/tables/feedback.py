"""Learned feedback against backpropagation: the tables of the study that goes beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.feedback_quality import quality_table
from gradguess_lab.tables.feedback_results import (
    QUANTITIES,
    RULE,
    Result,
    ablation_results,
    depth_results,
    residual_results,
    tuned_results,
    width_results,
)
from gradguess_lab.tables.runs import Run, Variant, command
from gradguess_lab.tables.table import Cell, Table, constant, mean_text, number, text

CHANCE = 0.15  # ten classes: nothing has been learned below this
WIDE = 0.05  # from this standard deviation on, the seeds are listed one by one
_SETTING = {"Model": "model", "Width": "width", "Depth": "depth", "Learning rate": "lr", "Schedule": "schedule"}


def feedback_tables(runs: Sequence[Run]) -> tuple[Table, ...]:
    """Every table that has a run of learned feedback in it."""
    width, tuned, depth = width_results(runs), tuned_results(runs), depth_results(runs)
    residual, ablations = residual_results(runs), ablation_results(runs)
    tables = [
        _table(
            "feedback-width",
            "Learned feedback as the width grows",
            width,
            "Three hidden layers, 300 epochs, learning rate 1e-4, one tangent per step unless said. " + RULE,
        ),
        _table(
            "feedback-tuned",
            "The same with a cosine schedule, three learning rates",
            tuned,
            "Every rate that was tried is shown: none was chosen by its test accuracy. All methods fit the training "
            "data, so the test column is where they differ.",
        ),
        _table(
            "feedback-depth",
            "Learned feedback as the depth grows",
            depth,
            "300 epochs, constant learning rate, no residual connections, no norm. A second sweep applies the chain "
            "rule once more, which is one step further towards backpropagation.",
        ),
        _table(
            "feedback-residual",
            "Residual networks",
            residual,
            "Pre-norm blocks of width 128, 20 epochs, batch 128. Lines with B = 0 show what the chain rule over one "
            "(two) hops does by itself at equal sweeps: the gradient along the skip path is exact without learning.",
        ),
        _table(
            "feedback-ablations",
            "Ablations",
            ablations,
            "Three hidden layers, 300 epochs, learning rate 1e-4. The lines without an addition are the methods as "
            "they are used elsewhere.",
        ),
        quality_table(runs),
        _shortfalls([*width, *tuned, *depth, *residual]),
    ]
    return tuple(table for table in tables if table is not None)


def _table(slug: str, title: str, results: list[Result], caption: str) -> Table | None:
    if not any(result.is_taught for result in results):
        return None
    accuracies = [part for name in QUANTITIES.values() for part in (f"{name} accuracy", f"{name} sd")]
    columns = ("Method", *_SETTING, *accuracies, *(f"{name} against backprop" for name in QUANTITIES.values()), "Seeds")
    rows = tuple(_row(result) for result in results)
    hidden = constant(columns, rows, set(_SETTING))
    hidden |= {i for i, name in enumerate(columns) if name.endswith(" sd")}  # shown beside the mean
    commands = {f"{r.label}, {r.setting}": command(r.config.as_dict()) for r in results}
    return Table(slug, title, columns, rows, caption, tuple(commands.items()), hidden)


def _row(result: Result) -> tuple[Cell, ...]:
    summaries = {quantity: result.ours(quantity) for quantity in QUANTITIES}
    accuracies = []
    for quantity, summary in summaries.items():
        accuracies += [_accuracy(result.variant, quantity), number(summary.sd if summary else None)]
    train = summaries["train_accuracy"]
    return (
        text(result.label),
        *(_cell(getattr(result.config, name)) for name in _SETTING.values()),
        *accuracies,
        *(_against(result, quantity) for quantity in QUANTITIES),
        number(train.n if train else None, "d"),
    )


def _cell(value: object) -> Cell:
    return number(value, "g") if isinstance(value, (int, float)) else text(value)


def _accuracy(variant: Variant | None, quantity: str) -> Cell:
    """Mean ± standard deviation, with a note on what a mean would hide."""
    values = variant.values(quantity) if variant else []
    summary = Summary.of(values)
    if summary is None:
        return Cell("not run")
    shown = mean_text(summary.mean, summary.sd)
    note = ""
    if max(values) < CHANCE:
        note = "chance level in every seed" if len(values) > 1 else "chance level"
    elif summary.sd is not None and summary.sd > WIDE:
        note = "seeds: " + ", ".join(f"{value:.3f}" for value in values)
    return Cell(shown, summary.mean, note=note)


def _against(result: Result, quantity: str) -> Cell:
    found = result.difference(quantity)
    if found is None:
        return Cell("–")
    gap, word = found
    return Cell(f"{number(gap, '.3f', signed=True).text} {word}", gap)


def _shortfalls(results: list[Result]) -> Table | None:
    """All lines that stay below backpropagation, the widest gap first; controls (B = 0) are left out."""
    results = [result for result in results if result.config.learn != "never"]
    lines = [
        (found[0], result, quantity)
        for result in results
        for quantity in QUANTITIES
        if (found := result.difference(quantity)) and found[1] == "below"
    ]
    if not any(result.is_taught for result in results):
        return None
    rows = tuple(
        (
            text(result.label),
            text(result.setting),
            text(QUANTITIES[quantity]),
            _accuracy(result.reference, quantity),
            _accuracy(result.variant, quantity),
            number(gap, ".3f", signed=True),
        )
        for gap, result, quantity in sorted(lines, key=lambda line: line[0])
    )
    return Table(
        "feedback-shortfalls",
        "Where it falls short",
        ("Method", "Setting", "Split", "Backpropagation", "Ours", "Difference"),
        rows,
        "Every line of the tables above whose accuracy is below backpropagation's by the rule given there; ablations "
        "and controls (B = 0) are left out. Where backpropagation's own seeds lie far apart, within says little.",
    )
