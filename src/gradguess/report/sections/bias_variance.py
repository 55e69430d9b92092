"""Variance, bias and covariance norm."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, bias_variance_table, layers_table
from gradguess.report.section import Section

__all__ = ["bias_variance"]

_INTRO = "What a guess costs: how far its mean lies from the gradient, and how far it scatters."


def bias_variance(runs: Sequence[Run]) -> Section:
    tables = (bias_variance_table(runs), layers_table(runs))
    return Section("bias-variance", "Variance, bias and covariance norm", _INTRO, tables, keep_empty=True)
