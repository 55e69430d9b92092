"""The paper's tables and figures, each published number beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import (
    BIAS_VARIANCE,
    CHOICE_OF_K,
    LAYER_SITES,
    NEWTON_SCHULZ,
    PRECONDITIONING,
    RANKS,
    SCALING,
    SETTING,
    WIDTHS,
    Published,
)
from gradguess_lab.tables.figure import Curve, Figure, means, with_bars
from gradguess_lab.tables.runs import Group, Run, command, groups, in_paper_setting, select
from gradguess_lab.tables.table import Row, Table, cell, table
from gradguess_lab.tables.verdicts import Summary, rounding_floor, verdict

SHARED = "W⊥, shared basis, k = 10"
DIAGNOSED = "0,1,3,10,30,100,200,300"  # the epochs at which a run of this repository is diagnosed
# What a quantity is called, and how its numbers are set.
KINDS = {
    "train_accuracy": ("Train accuracy", ".3f"),
    "test_accuracy": ("Test accuracy", ".3f"),
    "variance": ("Variance", ".2e"),
    "bias": ("Bias", ".2e"),
    "covariance_norm": ("Covariance norm", ".3f"),
    "cosine": ("Cosine", ".3f"),
    "gradient_norm": ("Gradient norm", ".2e"),
    "rank": ("Rank", ".0f"),
    "seconds": ("Training time", "duration"),
}
_MEASURED = (
    "Bias, variance and norm: at layer 1 and the last diagnosed epoch; the paper names neither the layer nor the step. "
    "It takes the variance from one draw per sample, and ours is the exact expectation."
)


@dataclass(frozen=True)
class Line:
    """A published number, and ours computed in one way (or not at all).

    An entry has one main line: the method by the paper's definition where that was run.
    """

    entry: Published
    group: Group | None
    ours: Summary | None
    main: bool = True

    @property
    def verdict(self) -> str:
        floor = None
        if self.group is not None and (self.entry.method, self.entry.quantity) == ("wp", "bias"):
            norms = self.group.summary("gradient_norm", self.entry.layer)
            floor = rounding_floor(self.entry.width, norms.mean, self.group["batch"]) if norms else None
        return verdict(self.entry, self.ours, floor)

    @property
    def method(self) -> str:
        named = method_label(self.entry.method)
        return named if self.entry.k is None else f"{named}, k = {self.entry.k}"

    @property
    def quantity(self) -> str:
        name = KINDS[self.entry.quantity][0]
        return name if self.entry.layer is None else f"{name}, layer {self.entry.layer}"

    @property
    def form(self) -> str:
        return KINDS[self.entry.quantity][1]

    @property
    def way(self) -> str:
        return self.group.way if self.group else ""

    @property
    def command(self) -> str:
        """How to get this line: the run itself, or what it would have been."""
        if self.group is not None:
            return self.group.command
        entry = self.entry
        wanted = {**SETTING, "method": entry.method, "width": entry.width, "seed": 0, "k": entry.k}
        wanted |= {"solver": "subspace"} if entry.method in {"wperp", "wperp-bottom"} else {}
        return command(wanted | ({"diagnose": DIAGNOSED} if entry.layer is not None else {}))

    @property
    def row(self) -> dict[str, Any]:
        ours, paper = self.ours, self.entry.value
        return {
            "Method": self.method,
            "Width": self.entry.width,
            "Quantity": self.quantity,
            "Paper": cell(paper, self.form),
            "Ours": cell(ours and ours.mean, self.form),
            "± sd": cell(ours and ours.sd, self.form),
            "Difference": cell(ours and ours.mean - paper, f"+{self.form}"),
            "Verdict": self.verdict,
            "Seeds": ours and ours.n,
            "Computed by": self.way,
        }


def compare(entries: Iterable[Published], runs: Sequence[Run]) -> Iterator[Line]:
    """Each entry once for every way it was computed; once without numbers if it was not run."""
    for entry in entries:
        lines: list[Line] = []
        for group in select(runs, entry.method, entry.width, entry.k):
            if ours := group.summary(entry.quantity, entry.layer):
                lines.append(Line(entry, group, ours, main=not lines))
        yield from lines or [Line(entry, None, None)]


# Of each table of published numbers: its title, its entries, and what it says.
PUBLISHED: dict[str, tuple[str, Sequence[Published], str]] = {
    "choice-of-k": ("Training accuracy by k", CHOICE_OF_K,
                    "Width 128, 300 epochs; k = rank keeps the whole image of the Jacobian."),
    "ranks": ("Ranks of the upstream Jacobian", RANKS,
              "The ranks in the legends of the overlap figure: of W M with M the ReLU mask. Ours: mean over a batch, "
              "trained with W⊥, k = 10; the paper does not say of what its one number is."),
    "bias-variance": ("Three guesses at width 128", BIAS_VARIANCE, _MEASURED),
    "scaling": ("Entry by entry", SCALING, "Training accuracy after 300 epochs; three hidden layers of this width."),
    "newton-schulz": ("Time and accuracy", NEWTON_SCHULZ,
                      "300 epochs. The paper's times are those of a laptop, with the SVD on its CPU."),
    "preconditioning": ("Three guesses at width 256", PRECONDITIONING, f"Accuracy after 300 epochs. {_MEASURED}"),
}  # fmt: skip


def published(slug: str, runs: Sequence[Run]) -> Table:
    """A row for every line of a table of published numbers."""
    title, entries, caption = PUBLISHED[slug]
    lines = list(compare(entries, runs))
    names = (f"{one.method}, width {one.entry.width}" + f" ({one.way})" * bool(one.way) for one in lines)
    commands = dict(zip(names, (one.command for one in lines), strict=True))
    return Table(slug, title, [one.row for one in lines], caption, ("Width", "Quantity", "Computed by"), commands)


# --- scaling ---


def scaling_columns(runs: Sequence[Run]) -> dict[str, dict[int, Line]]:
    """Lines by the method's title and the width; W⊥ with the shared basis under a title of its own."""
    columns: dict[str, dict[int, Line]] = {}
    for line in compare(SCALING, runs):
        columns.setdefault(line.method, {})
        title = line.method if line.group is None or line.group.by_definition else SHARED
        columns.setdefault(title, {}).setdefault(line.entry.width, line)
    return columns


@table(
    "scaling-matrix",
    "Training accuracy by width and method",
    "300 epochs. Ours, mean ± standard deviation, above the paper's number. W⊥ has each sample's own subspace, as the "
    "paper defines it; the shared basis is this library's default.",
)
def scaling_matrix(runs: Sequence[Run]) -> Iterator[Row]:
    """The scaling table in the paper's form: a row per width, a column per method, its number below ours."""
    columns = scaling_columns(runs)
    for width in WIDTHS:
        lines = {title: lines.get(width) for title, lines in columns.items()}
        yield {"Width": width} | {
            title: line and cell(line.ours, verdict=line.verdict, note=f"paper {line.entry.value:.3f}")
            for title, line in lines.items()
        }


def papers_curve(method: str) -> Curve:
    """What the paper has of a method in its table of scaling."""
    entries = [entry for entry in SCALING if entry.method == method]
    return Curve("", method, [float(e.width) for e in entries], [e.value for e in entries], kind="paper")


def over_width(slug: str, curves: Sequence[Curve], caption: str = "", x_scale: str = "linear") -> Figure:
    """Training accuracy over the width."""
    ticks = tuple(float(width) for width in WIDTHS)
    title = "Training accuracy after 300 epochs"
    return Figure(slug, title, "Layer width", "Train accuracy", curves, caption, ticks, (0.0, 1.05), x_scale=x_scale)


def scaling_figure(runs: Sequence[Run]) -> Figure:
    """Training accuracy over the width: ours solid with the spread of the seeds, the paper's dashed."""
    curves = []
    for title, lines in scaling_columns(runs).items():
        if points := {width: line.ours for width, line in lines.items() if line.ours}:
            method = next(line.entry.method for line in lines.values())
            curves.append(with_bars(title, "wperp-shared" if title == SHARED else method, points))
    paper = [papers_curve(method) for method in dict.fromkeys(entry.method for entry in SCALING)]
    caption = "Solid: ours, mean over the seeds, bars of one standard deviation. Dashed with open markers: the paper's."
    return over_width("scaling", [*paper, *curves] if curves else [], caption)


# --- diagnostics ---


def diagnosed(runs: Sequence[Run], method: str, width: int, k: int | None = None) -> Iterator[Group]:
    """The main way the method was computed, of those that were diagnosed."""
    return islice((group for group in select(runs, method, width, k) if group.epochs), 1)


@table(
    "diagnostics",
    "Every layer, over training",
    "Means over the seeds, on the first 512 training samples, for every diagnosed run in the paper's setting. The "
    "cosine is that of the estimate with the true gradient.",
    folded=True,
    forms={"Rank": ".0f"},
)
def diagnostics_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Every diagnosed experiment in the paper's setting, epoch and layer."""
    names = ("variance", "bias", "covariance_norm", "cosine", "gradient_norm", "rank")
    found = groups(run for run in runs if run["diagnostics"] and in_paper_setting(run) and not run["script"])
    for group in sorted(found, key=lambda group: (group["width"], group.label, group.way)):
        where = {"Method": group.label, "Width": group["width"], "Computed by": group.way}
        for epoch, layer in product(group.epochs, LAYER_SITES):
            means = {name: group.summary(name, layer, epoch=epoch) for name in names}
            if any(means.values()):
                shown = {KINDS[name][0]: one and one.mean for name, one in means.items()}
                yield {**where, "Epoch": epoch, "Layer": layer, **shown, "Seeds": len(group.runs)}


def over_training_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Variance, bias and gradient norm of layer 1 over training, with the paper's values as lines."""
    caption = (
        "Mean over the seeds with their range, on the first 512 training samples. Dashed: the paper's values, of which "
        "it does not say the epoch; it has none of the gradient norm."
    )
    methods = {"wt": None, "wperp-bottom": 10, "wperp": 10}
    known = [group for method, k in methods.items() for group in diagnosed(runs, method, 128, k)]
    for quantity in ("variance", "bias", "gradient_norm"):
        curves, title = [], KINDS[quantity][0]
        for method, epochs, group in ((group["method"], group.epochs, group) for group in known):
            found = {epoch: [v for v in group.by_seed(quantity, 1, epoch=epoch).values() if v] for epoch in epochs}
            if len(epochs) > 1 and any(found.values()):
                printed = [e.value for e in BIAS_VARIANCE if (e.method, e.quantity) == (method, quantity)]
                curves += [Curve("", method, [epochs[0], epochs[-1]], [value] * 2, kind="paper") for value in printed]
                curves.append(means(method_label(method), method, {e: values for e, values in found.items() if values}))
        slug, ticks = f"over-training-{quantity.replace('_', '-')}", (0, 1, 10, 100, 300)
        words = (f"{title} of layer 1, width 128", "Epoch", title)
        yield Figure(slug, *words, curves, caption, ticks, x_scale="symlog", y_scale="log")


def overlap_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """How much of the true gradient lies in the span of the k leading right singular vectors, per layer."""
    for width in (128, 512):
        curves = []
        for group, layer in product(diagnosed(runs, "wperp", width, 10), LAYER_SITES):
            if found := group.overlaps(layer):
                rank = statistics.fmean(group.by_seed("rank", layer).values())
                by_k = dict(enumerate(zip(*found, strict=False), 1))
                curves.append(means(f"Layer {layer}, rank = {rank:.0f}", f"layer-{layer}", by_k))
        yield Figure(
            f"overlap-{width}",
            f"Layer width = {width}",
            "Number of singular values k",
            "Overlap",
            curves,
            "Norm of the true gradient's projection on the k leading right singular vectors over its own norm, trained "
            "with W⊥, k = 10, at the last diagnosed epoch. The authors' scripts plot its square.",
            y_range=(0.0, 1.02),
            mark=(10.0, "k = 10"),
        )
