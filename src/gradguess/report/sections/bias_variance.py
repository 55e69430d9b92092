"""Variance, bias and covariance norm."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, bias_variance_table
from gradguess.report.section import Section

__all__ = ["bias_variance"]

_INTRO = "What a guess costs: how far its mean lies from the gradient, and how far it scatters."


def bias_variance(runs: Sequence[Run]) -> Section:
    table = bias_variance_table(runs)
    return Section("bias-variance", "Variance, bias and covariance norm", _INTRO, (table,), keep_empty=True)
