"""Preconditioning."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, preconditioning_table
from gradguess.report.section import Section

__all__ = ["preconditioning"]

_INTRO = "Wᴾ removes the bias and pays with variance."


def preconditioning(runs: Sequence[Run]) -> Section:
    table = preconditioning_table(runs)
    return Section("preconditioning", "Preconditioning", _INTRO, (table,), keep_empty=True)
