"""What the exact derivative of the loss at the output, in the place of a guess, does for each guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradguess_lab.methods import method_label
from gradguess_lab.plans import GUESSED, configs
from gradguess_lab.tables.averages import mean_cell
from gradguess_lab.tables.feedback_results import QUANTITIES, results_of
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Cell, Table, number, text


def exact_top_table(runs: Sequence[Run]) -> Table | None:
    """A row for every guess and width that was run with the exact top; None where there is none."""
    exact = [result for result in results_of(configs("exact-top"), runs) if result.variant]
    guessed = results_of([replace(result.config, top="guess") for result in exact], runs)
    rows = [
        (
            text(method_label(known.config.method)),
            number(known.config.width, "d"),
            *(mean_cell(result.ours(quantity)) for quantity in QUANTITIES for result in (without, known)),
            text(", ".join(str(len(result.variant.runs)) if result.variant else "0" for result in (without, known))),
        )
        for without, known in zip(guessed, exact, strict=True)
    ]
    if not rows:
        return None
    order = [method_label(name) for name in GUESSED]
    rows.sort(key=lambda row: (order.index(row[0].text), row[1].value))
    heads = [f"{shown}, top {way}" for shown in QUANTITIES.values() for way in ("guessed", "exact")]
    return Table(
        "exact-top",
        "The output guessed, and exact",
        ("Guess", "Width", *heads, "Seeds"),
        tuple[tuple[Cell, ...], ...](rows),
        "Accuracy after 300 epochs in the paper's setting; W⊥ with the shared basis. Seeds: of both.",
    )
