"""Results in, tables and curves out: pure functions, no files, no plotting."""

from gradguess.experiments.tables.claims import claims_table
from gradguess.experiments.tables.compare import RULES
from gradguess.experiments.tables.curves import overlap_figure, scaling_figure, training_figures
from gradguess.experiments.tables.feedback import feedback_tables
from gradguess.experiments.tables.feedback_figures import feedback_figures
from gradguess.experiments.tables.layers import layers_table
from gradguess.experiments.tables.paper import (
    bias_variance_table,
    choice_of_k_table,
    newton_schulz_table,
    preconditioning_table,
    rank_table,
    scaling_matrix,
    scaling_table,
)
from gradguess.experiments.tables.real import real_table
from gradguess.experiments.tables.runs import Run, Variant, command, method_label, variants
from gradguess.experiments.tables.table import Cell, Curve, Figure, Table, constant, number, slugify, text

__all__ = [
    "RULES",
    "Cell",
    "Curve",
    "Figure",
    "Run",
    "Table",
    "Variant",
    "bias_variance_table",
    "choice_of_k_table",
    "claims_table",
    "command",
    "constant",
    "feedback_figures",
    "feedback_tables",
    "layers_table",
    "method_label",
    "newton_schulz_table",
    "number",
    "overlap_figure",
    "preconditioning_table",
    "rank_table",
    "real_table",
    "scaling_figure",
    "scaling_matrix",
    "scaling_table",
    "slugify",
    "text",
    "training_figures",
    "variants",
]
