"""Choice of k."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, choice_of_k_table
from gradguess.report.section import Section

__all__ = ["choice_of_k"]

_INTRO = "How many of the leading directions to guess in. Fewer mean less variance and more bias."


def choice_of_k(runs: Sequence[Run]) -> Section:
    table = choice_of_k_table(runs)
    return Section("choice-of-k", "Choice of k", _INTRO, (table,), keep_empty=True)
