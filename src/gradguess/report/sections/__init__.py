"""The sections of the report, in order.

To add one: a file here with a function from runs to a `Section` (or None), and a line in `SECTIONS`.
A section whose tables and figures are all empty is left out of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradguess.report.section import Builder, Section
from gradguess.report.sections.bench import bench
from gradguess.report.sections.bias_variance import bias_variance
from gradguess.report.sections.choice_of_k import choice_of_k
from gradguess.report.sections.claims import claims
from gradguess.report.sections.feedback import feedback
from gradguess.report.sections.newton_schulz import newton_schulz
from gradguess.report.sections.overlap import overlap
from gradguess.report.sections.preconditioning import preconditioning
from gradguess.report.sections.real import real
from gradguess.report.sections.runs import all_runs
from gradguess.report.sections.scaling import scaling
from gradguess.report.sections.training import training

__all__ = ["FROM_FILES", "SECTIONS"]

SECTIONS: tuple[Builder, ...] = (
    claims,
    choice_of_k,
    overlap,
    bias_variance,
    scaling,
    newton_schulz,
    preconditioning,
    feedback,
    real,
    training,
    all_runs,
)

# sections made from files other than those of runs, after the rest
FROM_FILES: tuple[Callable[[Path], Section | None], ...] = (bench,)
