"""Training curves."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, training_figures
from gradguess.report.section import Section

__all__ = ["training"]


def training(runs: Sequence[Run]) -> Section:
    return Section("training", "Training curves", figures=tuple(training_figures(runs)))
