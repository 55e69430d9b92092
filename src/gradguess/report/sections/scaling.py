"""Scaling with the width."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, scaling_figure, scaling_matrix, scaling_table
from gradguess.report.section import Section

__all__ = ["scaling"]

_INTRO = (
    "Training accuracy over the width of the hidden layers. The paper prints some of these numbers twice, "
    "from two runs: Wᵀ at width 512 is 0.494 here and 0.486 in its Newton–Schulz table, so a single run is "
    "good to about a point."
)


def scaling(runs: Sequence[Run]) -> Section:
    figure = scaling_figure(runs)
    tables = (scaling_matrix(runs), scaling_table(runs))
    shown = (figure,) if figure else ()
    return Section("scaling", "Scaling with the width", _INTRO, tables, shown, keep_empty=True)
