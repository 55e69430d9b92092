"""How many of the paper's numbers hold: each published number once, by its main line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradguess.experiments.paper_numbers import DISTINCT
from gradguess.experiments.tables.compare import (
    DIFFERS,
    HOLDS,
    LEVEL,
    NOT_COMPARED,
    NOT_RUN,
    SINGLE,
    ZERO,
)
from gradguess.experiments.tables.lines import compare
from gradguess.experiments.tables.runs import Run
from gradguess.experiments.tables.table import Table, number, text
from gradguess.experiments.tables.variants import explanations


def verdicts(runs: Sequence[Run]) -> Counter[str]:
    """How many published numbers got which verdict."""
    return Counter(line.verdict for line in compare(DISTINCT, runs) if line.main)


def tally_table(runs: Sequence[Run]) -> Table:
    """The counts, and of those that differ how many a variant explains."""
    found = verdicts(runs)
    judged = found[HOLDS] + found[DIFFERS]
    explained = sum(bool(one.closing) for one in explanations(runs))
    counts = {
        "judged": judged,
        "hold": found[HOLDS],
        "differ": found[DIFFERS],
        "… expected by chance alone, if all were true (5 %)": LEVEL * judged,
        "… of them explained by a variant": explained,
        "… of them that remain": found[DIFFERS] - explained,
        ZERO: found[ZERO],
        SINGLE: found[SINGLE],
        "not compared (training times)": found[NOT_COMPARED],
        NOT_RUN: found[NOT_RUN],
    }
    return Table(
        "tally",
        "How many of the paper's numbers hold",
        ("Published numbers", "Count"),
        tuple(
            (text(name), number(count, ".1f" if isinstance(count, float) else "d")) for name, count in counts.items()
        ),
        "Each published number counts once, however often the paper prints it, by its main line: the method as the "
        "paper defines it. Explained: with one of the authors' scripts' ways, or all at once, the paper's number lies "
        "in the prediction interval.",
    )
