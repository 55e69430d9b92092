"""The paper's tables, each entry beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import (
    BIAS_VARIANCE,
    CHOICE_OF_K,
    NEWTON_SCHULZ,
    PRECONDITIONING,
    RANKS,
    SCALING,
    WIDTHS,
    Published,
)
from gradguess_lab.tables.lines import Line, compare, comparison_table
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Cell, Table, mean_text, number

SHARED = "W⊥, shared basis, k = 10"


def _published(slug: str, title: str, entries: Sequence[Published], caption: str) -> Callable[[Sequence[Run]], Table]:
    """A function from runs to the table of these published numbers."""
    return lambda runs: comparison_table(slug, title, compare(entries, runs), caption)


choice_of_k_table = _published(
    "choice-of-k",
    "Training accuracy by k",
    CHOICE_OF_K,
    "Width 128, 300 epochs; k = rank keeps the whole image of the Jacobian.",
)
rank_table = _published(
    "ranks",
    "Ranks of the upstream Jacobian",
    RANKS,
    "The ranks in the legends of the overlap figure. Ours: mean over a batch, trained with W⊥, k = 10.",
)
bias_variance_table = _published(
    "bias-variance",
    "Three guesses at width 128",
    BIAS_VARIANCE,
    "At the last diagnosed epoch. The paper names no layer: its numbers stand beside our layer 1.",
)
scaling_table = _published(
    "scaling",
    "Entry by entry",
    SCALING,
    "Training accuracy after 300 epochs; three hidden layers of the given width.",
)
newton_schulz_table = _published(
    "newton-schulz",
    "Time and accuracy",
    NEWTON_SCHULZ,
    "300 epochs. The paper's times are those of a laptop, with the SVD on its CPU.",
)
preconditioning_table = _published(
    "preconditioning",
    "Three guesses at width 256",
    PRECONDITIONING,
    "Variance and bias at layer 1 at the last diagnosed epoch; accuracy after 300 epochs.",
)


def scaling_matrix(runs: Sequence[Run]) -> Table:
    """The scaling table in the paper's form: a row per width, a column per method, its number below ours."""
    columns = scaling_columns(runs)
    rows = [
        (number(width, "d"), *(_matrix_cell(lines.get(width), title) for title, lines in columns.items()))
        for width in WIDTHS
    ]
    return Table(
        "scaling-matrix",
        "Training accuracy by width and method",
        ("Width", *columns),
        tuple(rows),
        "300 epochs. Ours, mean ± standard deviation, above the paper's number. W⊥ has each sample's own subspace, as "
        "the paper defines it; the shared basis is this library's default.",
    )


def scaling_columns(runs: Sequence[Run]) -> dict[str, dict[int, Line]]:
    """The main line of each entry by the method's title and the width; W⊥ with the shared basis under its own title."""
    columns: dict[str, dict[int, Line]] = {scaling_title(entry.method): {} for entry in SCALING}
    shared: dict[int, Line] = {}
    for line in compare(SCALING, runs):
        if line.main:
            columns[scaling_title(line.entry.method)][line.entry.width] = line
        elif line.variant and line.entry.method == "wperp" and not line.variant.by_definition:
            shared.setdefault(line.entry.width, line)
    if shared:  # beside the other W⊥
        titles = list(columns)
        place = titles.index(scaling_title("wperp")) + 1
        order = [*titles[:place], SHARED, *titles[place:]]
        columns = {title: shared if title == SHARED else columns[title] for title in order}
    return columns


def scaling_title(method: str) -> str:
    return method_label(method) + (", k = 10" if method == "wperp" else "")


def _matrix_cell(line: Line | None, title: str) -> Cell:
    if line is None:
        return Cell("–")
    paper = f"paper {line.entry.value:.3f}"
    if line.ours is None:
        return Cell("–", None, line.verdict, paper)
    substitute = title != SHARED and line.variant and not line.variant.by_definition
    note = f"shared basis; {paper}" if substitute else paper
    return Cell(mean_text(line.ours.mean, line.ours.sd), line.ours.mean, line.verdict, note)
