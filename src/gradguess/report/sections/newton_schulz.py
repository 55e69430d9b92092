"""Newton–Schulz."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, newton_schulz_table
from gradguess.report.section import Section

__all__ = ["newton_schulz"]

_INTRO = "W⊥ by matrix products instead of a singular value decomposition."


def newton_schulz(runs: Sequence[Run]) -> Section:
    table = newton_schulz_table(runs)
    return Section("newton-schulz", "Newton–Schulz", _INTRO, (table,), keep_empty=True)
