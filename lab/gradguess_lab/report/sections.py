"""The sections of the report, in order: one entry each, with its words, its tables and its figures.

To add a table or a figure to the page, name the function that makes it here. To add a section, add an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradguess_lab.tables import bench, beyond, claims, feedback, listing, paper, stored, tally
from gradguess_lab.tables.figure import Figure
from gradguess_lab.tables.paper import published
from gradguess_lab.tables.runs import in_paper_setting
from gradguess_lab.tables.table import Table

Shown = Table | Figure
Maker = Callable[[Sequence[Any]], Shown | Iterable[Shown] | None]  # from results to what is shown of them


@dataclass(frozen=True)
class Section:
    """A section with its tables and figures made."""

    slug: str
    title: str
    intro: str
    tables: Sequence[Table]
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Entry:
    """What a section is called, and what it is made of: of finished runs, or of the records of benchmarks.

    A section without anything to show is left out of the page, unless it is one of the paper's: those stay and say what
    was not run. Where no run is in the paper's setting, the paper's sections are left out.
    """

    slug: str
    title: str
    intro: str
    makers: Sequence[Maker]
    of_the_paper: bool = False
    source: str = "runs"


ENTRIES: tuple[Entry, ...] = (
    Entry("beside-stored", "This run beside the paper and our seeds", "",
          (stored.beside_stored_figure, stored.beside_stored_table)),
    Entry("scaling", "Scaling with the width",
          "The paper prints some of these numbers twice, from two runs: Wᵀ at width 512 is 0.494 here and 0.486 in its "
          "Newton–Schulz table, so a single run is good to about a point.",
          (paper.scaling_figure, paper.scaling_matrix, partial(published, "scaling")), of_the_paper=True),
    Entry("claims", "What the paper concludes", "", (claims.claims_table,), of_the_paper=True),
    Entry("variants", "The paper, and the authors' scripts",
          "What the authors' scripts do and the paper does not say, each run alone, and all together.",
          (tally.variants_table,)),
    Entry("claims-cost", "What the paper says about cost", "", (bench.speed_claims_table,), source="benchmarks"),
    Entry("choice-of-k", "Choice of k",
          "How many of the leading directions to guess in. Fewer mean less variance and more bias.",
          (partial(published, "choice-of-k"),), of_the_paper=True),
    Entry("overlap", "Where the gradient lies", "", (paper.overlap_figures, partial(published, "ranks")), True),
    Entry("bias-variance", "Variance, bias and covariance norm",
          "What a guess costs: how far its mean lies from the gradient, and how far it scatters.",
          (paper.over_training_figures, partial(published, "bias-variance"), paper.diagnostics_table), True),
    Entry("newton-schulz", "Newton–Schulz", "W⊥ by matrix products instead of a singular value decomposition.",
          (partial(published, "newton-schulz"),), of_the_paper=True),
    Entry("projector", "How far from the definition", "", (beyond.projector_table,), source="benchmarks"),
    Entry("preconditioning", "Preconditioning", "Wᴾ removes the bias and pays with variance.",
          (partial(published, "preconditioning"),), of_the_paper=True),
    Entry("exact-top", "The exact top",
          "Beyond the paper: after the forward pass the derivative of the loss with respect to the outputs is known. "
          'The paper draws N(0, I) there; top="exact" takes what is known.', (beyond.exact_top_table,)),
    Entry("feedback", "Learned feedback",
          "Beyond the paper: directional derivatives teach a matrix per layer to predict the gradient from the output "
          "error. Direct uses the prediction; chained pulls it through one layer by the chain rule; corrected adds "
          "what was measured and not predicted. All three use the exact gradient at the outputs.",
          (feedback.feedback_tables,)),
    Entry("real", "Real networks, real data",
          "Beyond the paper: convolutional, residual and attention networks on images and text. Sites are found by the "
          "library itself: the modules that feed the additions of a residual network, every layer elsewhere.",
          (beyond.real_table,)),
    Entry("training", "Training curves", "", (listing.training_figures,)),
    Entry("runs", "Every run", "", (listing.runs_table,)),
    Entry("bench", "What a step costs",
          "Time and memory of a training step against backpropagation written as a plain loop, AdamW fused on both "
          "sides. Loops take turns in one process; memory is measured in processes of their own.",
          (bench.bench_figures, bench.bench_tables), source="benchmarks"),
)  # fmt: skip


def is_of_the_paper(runs: Sequence[Any]) -> bool:
    """Whether the paper's numbers have a counterpart among the runs; benchmarks alone may answer to its claims."""
    return not runs or any(map(in_paper_setting, runs))


def build_sections(results: Mapping[str, Sequence[Any]]) -> list[Section]:
    """The sections that have something to show, and the paper's; `results` holds each source under its name."""
    built, paper_too = [], is_of_the_paper(results["runs"])
    for entry in ENTRIES:
        if entry.of_the_paper and not paper_too:
            continue
        made: list[Shown] = []
        for maker in entry.makers:
            found = maker(results[entry.source])
            made += [found] if isinstance(found, Shown) else found or ()
        tables = [one for one in made if isinstance(one, Table) and one.rows]
        figures = [one for one in made if isinstance(one, Figure) and one.curves]
        if figures or entry.of_the_paper or any(table.ran for table in tables):
            built.append(Section(entry.slug, entry.title, entry.intro, tables, figures))
    return built
