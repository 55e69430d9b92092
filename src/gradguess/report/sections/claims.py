"""What the paper concludes."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, claims_table
from gradguess.report.section import Section

__all__ = ["claims"]

_INTRO = "The sentences of the paper, each put to our numbers."


def claims(runs: Sequence[Run]) -> Section:
    table = claims_table(runs)
    return Section("claims", "What the paper concludes", _INTRO, (table,), keep_empty=True)
