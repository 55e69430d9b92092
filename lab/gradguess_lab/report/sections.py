"""The sections of the report, in order: one entry each, with its words, its tables and its figures.

To add a table or a figure to the page, name the function that makes it here. To add a section, add an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gradguess_lab.tables.bench import bench_figures, bench_tables
from gradguess_lab.tables.beside_stored import beside_stored_figure, beside_stored_table
from gradguess_lab.tables.claims import claims_table
from gradguess_lab.tables.curves import overlap_figures, scaling_figure, training_figures
from gradguess_lab.tables.exact_top import exact_top_table
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.feedback_figures import feedback_figures
from gradguess_lab.tables.layers import layers_table
from gradguess_lab.tables.listing import runs_table
from gradguess_lab.tables.networks import networks_table
from gradguess_lab.tables.over_training import over_training_figures, over_training_table
from gradguess_lab.tables.paper import (
    bias_variance_table,
    choice_of_k_table,
    newton_schulz_table,
    preconditioning_table,
    rank_table,
    scaling_matrix,
    scaling_table,
)
from gradguess_lab.tables.projector import projector_table
from gradguess_lab.tables.real import real_table
from gradguess_lab.tables.runs import Run, in_paper_setting, toggles
from gradguess_lab.tables.solvers import solvers_table
from gradguess_lab.tables.speed import speed_claims_table
from gradguess_lab.tables.table import Figure, Table
from gradguess_lab.tables.tally import tally_table
from gradguess_lab.tables.variants import overlap_table, variants_table

Shown = TypeVar("Shown", Table, Figure)
Maker = Callable[[Sequence[Any]], Shown | Iterable[Shown] | None]  # from the results to what is shown of them


@dataclass(frozen=True)
class SectionEntry:
    """What a section is called, and what it is made of.

    `source` says what its makers read: finished runs, or the records of benchmarks. A section without anything to show
    is left out of the page, unless it is one of the paper's: those stay and say what was not run. Where no run is in
    the paper's setting, the paper's sections are left out.
    """

    slug: str
    title: str
    intro: str = ""
    tables: tuple[Maker[Table], ...] = ()
    figures: tuple[Maker[Figure], ...] = ()
    of_the_paper: bool = False
    source: Literal["runs", "benchmarks"] = "runs"


@dataclass(frozen=True)
class Section:
    """A section with its tables and figures made."""

    slug: str
    title: str
    intro: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]

    @property
    def has_data(self) -> bool:
        return bool(self.figures) or any(table.ran for table in self.tables)


SECTIONS: tuple[SectionEntry, ...] = (
    SectionEntry(
        "beside-stored",
        "This run beside the paper and our seeds",
        tables=(beside_stored_table,),
        figures=(beside_stored_figure,),
    ),
    SectionEntry(
        "scaling",
        "Scaling with the width",
        "Training accuracy over the width of the hidden layers. The paper prints some of these numbers twice, "
        "from two runs: Wᵀ at width 512 is 0.494 here and 0.486 in its Newton–Schulz table, so a single run is "
        "good to about a point.",
        tables=(scaling_matrix, scaling_table, solvers_table),
        figures=(scaling_figure,),
        of_the_paper=True,
    ),
    SectionEntry(
        "claims",
        "What the paper concludes",
        "How many of the paper's numbers hold, and its sentences, each put to our numbers by a stated test.",
        tables=(tally_table, claims_table),
        of_the_paper=True,
    ),
    SectionEntry(
        "variants",
        "The paper, and the authors' scripts",
        "The authors' scripts do some things that the paper does not say. Each was run alone, and all together.",
        tables=(variants_table, overlap_table),
    ),
    SectionEntry(
        "claims-cost",
        "What the paper says about cost",
        tables=(speed_claims_table,),
        source="benchmarks",
    ),
    SectionEntry(
        "choice-of-k",
        "Choice of k",
        "How many of the leading directions to guess in. Fewer mean less variance and more bias.",
        tables=(choice_of_k_table,),
        of_the_paper=True,
    ),
    SectionEntry(
        "overlap",
        "Where the gradient lies",
        "How much of the true gradient lies in the span of the k leading right singular vectors of the Jacobian "
        "above a layer: 1 means all of it.",
        tables=(rank_table,),
        figures=(overlap_figures,),
        of_the_paper=True,
    ),
    SectionEntry(
        "bias-variance",
        "Variance, bias and covariance norm",
        "What a guess costs: how far its mean lies from the gradient, and how far it scatters.",
        tables=(bias_variance_table, over_training_table, networks_table, layers_table),
        figures=(over_training_figures,),
        of_the_paper=True,
    ),
    SectionEntry(
        "newton-schulz",
        "Newton–Schulz",
        "W⊥ by matrix products instead of a singular value decomposition.",
        tables=(newton_schulz_table,),
        of_the_paper=True,
    ),
    SectionEntry(
        "projector",
        "How far from the definition",
        "How far the covariance of each guess lies from the projector on the sample's own top-k subspace, "
        "which defines W⊥.",
        tables=(projector_table,),
        source="benchmarks",
    ),
    SectionEntry(
        "preconditioning",
        "Preconditioning",
        "Wᴾ removes the bias and pays with variance.",
        tables=(preconditioning_table,),
        of_the_paper=True,
    ),
    SectionEntry(
        "exact-top",
        "The exact top",
        "Beyond the paper: after the forward pass the derivative of the loss with respect to the outputs is known. The "
        'paper draws N(0, I) there; top="exact" takes what is known.',
        tables=(exact_top_table,),
    ),
    SectionEntry(
        "feedback",
        "Learned feedback",
        "Beyond the paper: directional derivatives teach a matrix per layer to predict the gradient from the output "
        "error, instead of being spent as updates. Direct uses the prediction; chained pulls it through one layer by "
        "the chain rule; corrected adds what was measured and not predicted. All three use the exact gradient at the "
        "outputs. Where the method falls short of backpropagation is listed at the end.",
        tables=(feedback_tables,),
        figures=(feedback_figures,),
    ),
    SectionEntry(
        "real",
        "Real networks, real data",
        "Beyond the paper: convolutional, residual and attention networks on images and text. Sites are found by the "
        "library itself: the modules that feed the additions of a residual network, every layer elsewhere.",
        tables=(real_table,),
    ),
    SectionEntry("training", "Training curves", figures=(training_figures,)),
    SectionEntry("runs", "Every run", tables=(runs_table,)),
    SectionEntry(
        "bench",
        "What a step costs",
        "Time and memory of a training step against backpropagation written as a plain loop, AdamW fused on both "
        "sides. Loops take turns in one process; memory is measured in processes of their own.",
        tables=(bench_tables,),
        figures=(bench_figures,),
        source="benchmarks",
    ),
)


def is_of_the_paper(runs: Sequence[Run]) -> bool:
    """Whether the paper's numbers have a counterpart among the runs; benchmarks alone may answer to its claims."""
    return not runs or any(in_paper_setting(run, ",".join(toggles(run))) for run in runs)


def build_sections(results: Mapping[str, Sequence[Any]]) -> list[Section]:
    """The sections that have something to show, and the paper's; `results` holds each source under its name."""
    built, paper = [], is_of_the_paper(results["runs"])
    for entry in SECTIONS:
        if entry.of_the_paper and not paper:
            continue
        found = results[entry.source]
        section = Section(entry.slug, entry.title, entry.intro, _make(entry.tables, found), _make(entry.figures, found))
        if section.has_data or entry.of_the_paper:
            built.append(section)
    return built


def _make(makers: Iterable[Maker[Shown]], results: Sequence[Any]) -> tuple[Shown, ...]:
    made: list[Shown] = []
    for maker in makers:
        found = maker(results)
        if isinstance(found, (Table, Figure)):
            made.append(found)
        elif found is not None:
            made.extend(found)
    return tuple(made)
