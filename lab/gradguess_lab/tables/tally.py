"""How many of the paper's numbers hold: each published number once, by its main line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gradguess_lab.paper_numbers import DISTINCT
from gradguess_lab.tables.compare import (
    DIFFERS,
    HOLDS,
    LEVEL,
    NOT_COMPARED,
    NOT_RUN,
    SINGLE,
    ZERO,
    verdict,
)
from gradguess_lab.tables.lines import compare
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table, number, text
from gradguess_lab.tables.variants import explanations


def verdicts(runs: Sequence[Run]) -> Counter[str]:
    """How many published numbers got which verdict."""
    return Counter(line.verdict for line in compare(DISTINCT, runs) if line.main)


def holding_when_lower(runs: Sequence[Run], share: float = 0.05) -> int:
    """How many of the numbers that hold would hold as well if our means were lower by this share."""
    holding = (line for line in compare(DISTINCT, runs) if line.main and line.verdict == HOLDS)
    lower = [(line.entry, replace(line.ours, mean=(1 - share) * line.ours.mean)) for line in holding if line.ours]
    return sum(verdict(entry, ours) == HOLDS for entry, ours in lower)


def tally_table(runs: Sequence[Run]) -> Table:
    """The counts, and of those that differ how many a variant explains."""
    found = verdicts(runs)
    judged = found[HOLDS] + found[DIFFERS]
    explained = sum(bool(one.closing) for one in explanations(runs))
    counts = {
        "judged": judged,
        "hold": found[HOLDS],
        "… that would hold as well with our means 5 % lower": holding_when_lower(runs),
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
        "paper defines it. The paper has one run a number, so that a wide interval passes easily: see how many would "
        "hold with other means. Explained: one of the authors' scripts' ways, or all at once, brings our number "
        "nearer, and the paper's lies in its interval and in one as wide as that of the main line.",
    )
