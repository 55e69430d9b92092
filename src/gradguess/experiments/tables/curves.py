"""The paper's figures, and the training curves, as curve data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradguess.experiments.paper_numbers import LAYER_SITES, SCALING, WIDTHS
from gradguess.experiments.tables.compare import Summary
from gradguess.experiments.tables.paper import compare
from gradguess.experiments.tables.runs import Run, Variant, method_label, select, variants
from gradguess.experiments.tables.table import Curve, Figure, slugify

__all__ = ["overlap_figure", "scaling_figure", "training_figures"]

_TRAINING = (
    ("train_loss", "Train loss"),
    ("train_accuracy", "Train accuracy"),
    ("test_accuracy", "Test accuracy"),
)
MAX_CURVES = 12  # a training figure with more lines than this cannot be read


def scaling_figure(runs: Sequence[Run]) -> Figure | None:
    """Training accuracy over the width: ours solid with the spread of the seeds, the paper's dashed."""
    ours = [curve for method in _methods() if (curve := _our_scaling(method, runs))]
    if not ours:
        return None
    paper = [_paper_scaling(method) for method in _methods()]
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


def _methods() -> list[str]:
    return list(dict.fromkeys(entry.method for entry in SCALING))


def _paper_scaling(method: str) -> Curve:
    entries = [entry for entry in SCALING if entry.method == method]
    x, y = [float(e.width) for e in entries], [e.value for e in entries]
    return Curve("", x, y, method, dashed=True, markers=True)


def _our_scaling(method: str, runs: Sequence[Run]) -> Curve | None:
    points: dict[int, Summary] = {}
    for line in compare([entry for entry in SCALING if entry.method == method], runs):
        if line.ours is not None:
            points.setdefault(line.entry.width, line.ours)
    if not points:
        return None
    mean = [point.mean for point in points.values()]
    sd = [point.sd or 0.0 for point in points.values()]
    label = method_label(method) + (", k = 10" if method == "wperp" else "")
    return Curve(
        label,
        [float(width) for width in points],
        mean,
        method,
        low=[m - s for m, s in zip(mean, sd, strict=True)],
        high=[m + s for m, s in zip(mean, sd, strict=True)],
        markers=True,
        error_bars=True,
    )


@dataclass(frozen=True)
class _Overlap:
    curve: list[float]
    rank: float | None


def overlap_figure(runs: Sequence[Run], width: int) -> Figure | None:
    """How much of the true gradient lies in the span of the k leading right singular vectors, per layer."""
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
    found = [overlap for run in variant.runs if (overlap := _overlap(run, layer))]
    if not found:
        return None
    length = min(len(overlap.curve) for overlap in found)
    columns = list(zip(*(overlap.curve[:length] for overlap in found), strict=True))
    ranks = [overlap.rank for overlap in found if overlap.rank is not None]
    label = f"Layer {layer}" + (f", rank = {statistics.fmean(ranks):.0f}" if ranks else "")
    spread = len(found) > 1
    return Curve(
        label,
        [float(k) for k in range(1, length + 1)],
        [statistics.fmean(column) for column in columns],
        f"layer-{layer}",
        low=[min(column) for column in columns] if spread else None,
        high=[max(column) for column in columns] if spread else None,
    )


def _overlap(run: Run, layer: int) -> _Overlap | None:
    if not run.diagnostics:
        return None
    last = max(run.diagnostics, key=lambda entry: entry["epoch"])
    site = last["sites"].get(LAYER_SITES[layer], {})
    curve = site.get("overlap")
    return _Overlap(list(curve), site.get("rank")) if curve else None


def training_figures(runs: Sequence[Run]) -> list[Figure]:
    """Loss and accuracy over the epochs, one set of figures for each task and shape of network."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        if run.history:
            groups.setdefault(_shape(run), []).append(run)
    figures = []
    for shape in sorted(groups, key=_natural):
        figures += _training_trio(shape, variants(groups[shape]))
    return figures


def _shape(run: Run) -> tuple[str, ...]:
    return tuple(str(run.config.get(name, "?")) for name in ("data", "model", "depth", "width"))


def _natural(shape: tuple[str, ...]) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in shape)


def _training_trio(shape: tuple[str, ...], found: list[Variant]) -> list[Figure]:
    data, model, depth, width = shape
    shown = _readable(found)
    left_out = f" {len(found) - len(shown)} more experiments are left out." if len(shown) < len(found) else ""
    title = f"{data}, {model}, depth {depth}, width {width}"
    slug = f"training-{data}-{model}-{depth}-{width}"
    figures = []
    for quantity, label in _TRAINING:
        curves = tuple(c for v in shown if (c := _training_curve(v, quantity)))
        if curves:
            caption = f"{label} over the epochs, mean over the seeds with their range.{left_out}"
            figures.append(Figure(slugify(f"{slug} {quantity}"), title, "Epoch", label, curves, caption))
    return figures


def _readable(found: list[Variant]) -> list[Variant]:
    ordered = sorted(found, key=lambda variant: (variant.first.label, variant.label))
    return ordered[:MAX_CURVES]


def _training_curve(variant: Variant, quantity: str) -> Curve | None:
    by_epoch: dict[float, list[float]] = {}
    for run in variant.runs:
        for row in run.history:
            if row.get(quantity) is not None:
                by_epoch.setdefault(row["epoch"], []).append(row[quantity])
    if not by_epoch:
        return None
    epochs = sorted(by_epoch)
    many = len(variant.runs) > 1
    label = variant.first.label + (f" ({variant.label})" if variant.label else "")
    return Curve(
        label,
        epochs,
        [statistics.fmean(by_epoch[epoch]) for epoch in epochs],
        variant.first.method,
        low=[min(by_epoch[epoch]) for epoch in epochs] if many else None,
        high=[max(by_epoch[epoch]) for epoch in epochs] if many else None,
        dashed=variant.first.config.get("k") not in (None, 10) and variant.first.method == "wperp",
    )
