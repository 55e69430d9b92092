"""Learned feedback."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, feedback_figures, feedback_tables
from gradguess.report.section import Section

__all__ = ["feedback"]

_INTRO = (
    "Beyond the paper: directional derivatives teach a matrix per layer to predict the gradient from the output error, "
    "instead of being spent as updates. Direct uses the prediction; chained pulls it through one layer by the chain "
    "rule; corrected adds what was measured and not predicted. All three use the exact gradient at the outputs. "
    "Where the method falls short of backpropagation is listed at the end."
)


def feedback(runs: Sequence[Run]) -> Section:
    return Section("feedback", "Learned feedback", _INTRO, feedback_tables(runs), feedback_figures(runs))
