"""Where the gradient lies."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, overlap_figure, rank_table
from gradguess.report.section import Section

__all__ = ["overlap"]

_INTRO = (
    "How much of the true gradient lies in the span of the k leading right singular vectors of the Jacobian "
    "above a layer: 1 means all of it."
)


def overlap(runs: Sequence[Run]) -> Section:
    figures = (overlap_figure(runs, width) for width in (128, 512))
    shown = tuple(figure for figure in figures if figure)
    return Section("overlap", "Where the gradient lies", _INTRO, (rank_table(runs),), shown, keep_empty=True)
