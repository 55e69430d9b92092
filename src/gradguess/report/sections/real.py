"""Real networks on real data."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.experiments.tables import Run, real_table
from gradguess.report.section import Section

__all__ = ["real"]

_INTRO = (
    "Beyond the paper: convolutional, residual and attention networks on images and text. Sites are found by the "
    "library itself: the modules that feed the additions of a residual network, every layer elsewhere."
)


def real(runs: Sequence[Run]) -> Section:
    table = real_table(runs)
    return Section("real", "Real networks, real data", _INTRO, () if table is None else (table,), ())
