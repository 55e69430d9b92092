"""The paper's figures, and the training curves, as curve data."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from gradguess_lab.methods import METHODS
from gradguess_lab.paper_numbers import LAYER_SITES, SCALING, WIDTHS
from gradguess_lab.tables.averages import curve_of_means, epoch_curve
from gradguess_lab.tables.lines import Line
from gradguess_lab.tables.paper import SHARED, scaling_columns
from gradguess_lab.tables.runs import Run, Variant, overlap_of, select, toggles, variants
from gradguess_lab.tables.table import Curve, Figure, slugify

_TRAINING = {
    "train_loss": "Train loss",
    "test_loss": "Test loss",
    "train_accuracy": "Train accuracy",
    "test_accuracy": "Test accuracy",
}
MAX_CURVES = 12  # a training figure with more lines than this cannot be read


def scaling_figure(runs: Sequence[Run]) -> Figure | None:
    """Training accuracy over the width: ours solid with the spread of the seeds, the paper's dashed."""
    ours = [curve for title, lines in scaling_columns(runs).items() if (curve := _our_scaling(title, lines))]
    if not ours:
        return None
    paper = [_paper_scaling(method) for method in dict.fromkeys(entry.method for entry in SCALING)]
    return Figure(
        "scaling",
        "Training accuracy as the width increases",
        "Layer width",
        "Train accuracy (300 epochs)",
        (*paper, *ours),
        "Solid with filled markers: ours, mean over the seeds, bars of one standard deviation. "
        "Dashed with open markers: the paper's.",
        x_ticks=tuple(float(width) for width in WIDTHS),
        y_range=(0.0, 1.05),
    )


def _paper_scaling(method: str) -> Curve:
    entries = [entry for entry in SCALING if entry.method == method]
    x, y = [float(e.width) for e in entries], [e.value for e in entries]
    return Curve("", x, y, method, dashed=True, markers=True)


def _our_scaling(title: str, lines: Mapping[int, Line]) -> Curve | None:
    points = [(width, line.ours) for width, line in lines.items() if line.ours]
    method = next((line.entry.method for line in lines.values()), "")
    return curve_of_means(title, points, "wperp-shared" if title == SHARED else method)


def overlap_figures(runs: Sequence[Run]) -> list[Figure]:
    """How much of the true gradient lies in the span of the k leading right singular vectors, per layer."""
    return [figure for width in (128, 512) if (figure := _overlap_figure(runs, width))]


def _overlap_figure(runs: Sequence[Run], width: int) -> Figure | None:
    variant = next((v for v in select(runs, "wperp", width, k=10) if any(r.diagnostics for r in v.runs)), None)
    if variant is None:
        return None
    curves = [curve for layer in LAYER_SITES if (curve := _overlap_curve(variant, layer))]
    if not curves:
        return None
    seeds = len({run.config.get("seed") for run in variant.runs})
    return Figure(
        f"overlap-{width}",
        f"Layer width = {width}",
        "Number of singular values k",
        "Overlap",
        tuple(curves),
        "Norm of the true gradient's projection on the k leading right singular vectors over its own norm, "
        f"trained with W⊥, k = 10, at the last diagnosed epoch; {seeds} {'seed' if seeds == 1 else 'seeds'}.",
        y_range=(0.0, 1.02),
        mark=(10.0, "k = 10"),
        legend_columns=1,
    )


def _overlap_curve(variant: Variant, layer: int) -> Curve | None:
    found = [overlap for run in variant.runs if (overlap := overlap_of(run, layer))]
    if not found:
        return None
    length = min(len(overlap) for overlap in found)
    columns = list(zip(*(overlap[:length] for overlap in found), strict=True))
    ranks = variant.values("rank", layer)
    return Curve(
        f"Layer {layer}" + (f", rank = {statistics.fmean(ranks):.0f}" if ranks else ""),
        [float(k) for k in range(1, length + 1)],
        [statistics.fmean(column) for column in columns],
        f"layer-{layer}",
        low=[min(column) for column in columns] if len(found) > 1 else None,
        high=[max(column) for column in columns] if len(found) > 1 else None,
    )


def training_figures(runs: Sequence[Run]) -> list[Figure]:
    """Loss and accuracy over the epochs, a pair of figures for each task and shape of network."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        if run.history and not toggles(run):
            groups.setdefault(_shape(run), []).append(run)
    figures: dict[str, list[Figure]] = {}
    for shape in sorted(groups, key=_natural):
        slug = slugify("training " + " ".join(shape))[:80]
        while slug in figures:  # names that differ in signs only
            slug += "-x"
        figures[slug] = _training_pair(slug, shape, variants(groups[shape]))
    return [figure for pair in figures.values() for figure in pair]


def _shape(run: Run) -> tuple[str, ...]:
    return tuple(str(run.config.get(name, "?")) for name in ("data", "model", "depth", "width"))


def _natural(shape: tuple[str, ...]) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in shape)


def _training_pair(slug: str, shape: tuple[str, ...], found: list[Variant]) -> list[Figure]:
    data, model, depth, width = shape
    shown = sorted(found, key=_by_method)[:MAX_CURVES]
    names = Counter(variant.first.label for variant in shown)
    left_out = f" {len(found) - len(shown)} more experiments are left out." if len(shown) < len(found) else ""
    figures = []
    for quantity, label in _TRAINING.items():
        curves = [_training_curve(variant, quantity, names) for variant in shown]
        figures.append(
            Figure(
                slugify(f"{slug} {quantity}"),
                f"{data}, {model}, depth {depth}, width {width}",
                "Epoch",
                label,
                tuple(curve for curve in curves if curve),
                f"{label} over the epochs, mean over the seeds with their range.{left_out}",
            )
        )
    return [figure for figure in figures if figure.curves]


def _by_method(variant: Variant) -> tuple[int, str, str]:
    known = list(METHODS)
    method = variant.first.method
    return known.index(method) if method in known else len(known), variant.first.label, variant.label


def _training_curve(variant: Variant, quantity: str, names: Counter[str]) -> Curve | None:
    first = variant.first
    twice = names[first.label] > 1 and variant.label
    label = f"{first.label} ({variant.label})" if twice else first.label
    dashed = bool(twice) and first.config.get("solver") == "svd"
    return epoch_curve(variant, quantity, label, _style(first), dashed)


def _style(run: Run) -> str:
    """W⊥ has a shade of its own for every k that the paper tries."""
    k = run.config.get("k", 10)
    return f"{run.method}-{k}" if run.method == "wperp" and k != 10 else run.method
