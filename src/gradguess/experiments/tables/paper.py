"""The paper's tables, each entry beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.paper_numbers import (
    BIAS_VARIANCE,
    CHOICE_OF_K,
    NEWTON_SCHULZ,
    PRECONDITIONING,
    RANKS,
    SCALING,
    WIDTHS,
)
from gradguess.experiments.tables.lines import Line, compare, comparison_table
from gradguess.experiments.tables.runs import Run, method_label
from gradguess.experiments.tables.table import Cell, Table, number

__all__ = [
    "bias_variance_table",
    "choice_of_k_table",
    "newton_schulz_table",
    "preconditioning_table",
    "rank_table",
    "scaling_matrix",
    "scaling_table",
]


def choice_of_k_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "choice-of-k",
        "Training accuracy by k",
        compare(CHOICE_OF_K, runs),
        "Width 128, 300 epochs; k = rank keeps the whole image of the Jacobian.",
    )


def rank_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "ranks",
        "Ranks of the upstream Jacobian",
        compare(RANKS, runs),
        "The ranks in the legends of the overlap figure. Ours: mean over a batch, trained with W⊥, k = 10.",
    )


def bias_variance_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "bias-variance",
        "Three guesses at width 128",
        compare(BIAS_VARIANCE, runs),
        "At the last diagnosed epoch. The paper names no layer: its numbers stand beside our layer 1.",
    )


def scaling_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "scaling",
        "Entry by entry",
        compare(SCALING, runs),
        "Training accuracy after 300 epochs; three hidden layers of the given width.",
    )


def newton_schulz_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "newton-schulz",
        "Time and accuracy",
        compare(NEWTON_SCHULZ, runs),
        "300 epochs. The paper's times are those of a laptop, with the SVD on its CPU.",
    )


def preconditioning_table(runs: Sequence[Run]) -> Table:
    return comparison_table(
        "preconditioning",
        "Three guesses at width 256",
        compare(PRECONDITIONING, runs),
        "Variance and bias at layer 1 at the last diagnosed epoch; accuracy after 300 epochs.",
    )


def scaling_matrix(runs: Sequence[Run]) -> Table:
    """The scaling table in the paper's form: a row per width, a column per method, its number below ours."""
    methods = list(dict.fromkeys(entry.method for entry in SCALING))
    best: dict[tuple[int, str], Line] = {}
    for line in compare(SCALING, runs):
        best.setdefault((line.entry.width, line.entry.method), line)  # most seeds come first
    rows = [(number(width, "d"), *(_matrix_cell(best[width, method]) for method in methods)) for width in WIDTHS]
    titles = [method_label(method) + (", k = 10" if method == "wperp" else "") for method in methods]
    return Table(
        "scaling-matrix",
        "Training accuracy by width and method",
        ("Width", *titles),
        tuple(rows),
        "300 epochs. Ours, mean ± standard deviation, above the paper's number.",
    )


def _matrix_cell(line: Line) -> Cell:
    paper = f"paper {line.entry.value:.3f}"
    if line.ours is None:
        return Cell("–", None, line.verdict, paper)
    spread = "" if line.ours.sd is None else f" ± {line.ours.sd:.3f}"
    return Cell(f"{line.ours.mean:.3f}{spread}", line.ours.mean, line.verdict, paper)
