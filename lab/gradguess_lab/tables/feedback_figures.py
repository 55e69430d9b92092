"""Learned feedback against backpropagation: the figures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from gradguess_lab.config import TrainConfig
from gradguess_lab.plans import PRESETS, configs
from gradguess_lab.tables.averages import curve_of_means, epoch_curve
from gradguess_lab.tables.feedback_results import (
    QUANTITIES,
    Result,
    ablation_results,
    depth_results,
    results_of,
)
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Curve, Figure, slugify

_OVER_WIDTH = ("backprop", "feedback-direct", "feedback-chained", "wperp", "wt")


def feedback_figures(runs: Sequence[Run]) -> tuple[Figure, ...]:
    """Accuracy over width, work, tangents and epochs; how good the estimate is; the ablations."""
    if not any(run.method.startswith("feedback") for run in runs):
        return ()
    figures = [_over_width(runs, quantity) for quantity in QUANTITIES]
    figures += _over_cost(runs)
    figures += _over_epochs(depth_results(runs))
    figures += _quality(runs)
    figures += [_dots(ablation_results(runs))]
    return tuple(figure for figure in figures if figure and figure.curves)


def _over_width(runs: Sequence[Run], quantity: str) -> Figure | None:
    widths = sorted({width for preset in PRESETS.values() for width in (*preset.widths, *preset.wide)})
    curves = []
    for method in _OVER_WIDTH:
        results = results_of([TrainConfig(method=method, width=width) for width in widths], runs)
        points = [(result.config.width, summary) for result in results if (summary := result.ours(quantity))]
        if curve := curve_of_means(results[0].label, points, method):
            curves.append(curve)
    if not any(curve.style.startswith("feedback") for curve in curves):
        return None
    name = QUANTITIES[quantity]
    return Figure(
        slugify(f"feedback width {name}"),
        f"{name} accuracy over the width",
        "Layer width",
        f"{name} accuracy",
        tuple(curves),
        "Three hidden layers, 300 epochs, learning rate 1e-4, one tangent per step. Mean over the seeds; bars of one "
        "standard deviation.",
        x_ticks=tuple(sorted({x for curve in curves for x in curve.x})),
        y_range=(0.0, 1.05),
        log_x=True,
    )


_COSTED = (
    TrainConfig(method="backprop"),
    TrainConfig(method="feedback-chained"),
    TrainConfig(method="feedback-direct"),
    TrainConfig(method="feedback-direct", every=4, fraction=0.25),
    TrainConfig(method="wperp"),
    TrainConfig(method="wt"),
    TrainConfig(method="activation"),
)


def work(config: TrainConfig) -> float:
    """Passes over the network in one step, each one product per layer: forward, tangent, chain rule, weights.

    >>> [work(TrainConfig(method=method)) for method in ("backprop", "wperp", "wt", "feedback-direct")]
    [3.0, 3.0, 4.0, 3.0]
    >>> work(TrainConfig(method="feedback-direct", every=4, fraction=0.25))
    2.0625
    """
    if config.method == "backprop":
        return 3.0
    if config.method == "weight":
        return 1.0 + config.tangents
    if not config.method.startswith("feedback"):
        return 2.0 + tangents(config) * (2 if config.method == "wt" else 1)
    return 2.0 + tangents(config) + (config.sweeps if config.method == "feedback-chained" else 0)


def tangents(config: TrainConfig) -> float:
    """Tangent passes of the whole batch in one step."""
    taught = config.method.startswith("feedback")
    return config.tangents * (config.fraction / config.every if taught else 1.0)


def _over_cost(runs: Sequence[Run]) -> list[Figure | None]:
    """Test accuracy at width 512 against the work and against the tangents that training took."""
    ran = [
        result
        for result in results_of([dataclasses.replace(config, width=512) for config in _COSTED], runs)
        if result.variant and any(run.history for run in result.variant.runs)
    ]
    if not any(result.is_taught for result in ran):
        return []
    made: list[Figure | None] = []
    for slug, words, price in (
        ("work", "passes over the network", work),
        ("tangents", "tangent passes of the whole batch", tangents),
    ):
        shown = [result for result in ran if slug == "work" or result.config.method != "backprop"]
        curves = [
            dataclasses.replace(curve, x=[epoch * price(result.config) for epoch in curve.x], low=None, high=None)
            for result in shown
            for curve in _training(result, "test_accuracy")
        ]
        made.append(
            Figure(
                f"feedback-{slug}",
                f"Test accuracy against {slug}, width 512",
                f"Epochs × {words} per step",
                "Test accuracy",
                tuple(curves),
                "Mean over the seeds. A pass is one product per layer; drawing directions and small operations are not "
                "counted, see the benchmark for times.",
                legend_columns=1,
            )
        )
    return made


_QUALITIES = {"cosine": "Cosine", "bias": "Bias", "variance": "Variance"}


def _quality(runs: Sequence[Run]) -> list[Figure | None]:
    """Cosine with the true gradient, bias and variance over training: the mean over the hidden layers."""
    looked_at = [run for run in runs if run.diagnostics]
    ran = [result for result in results_of(configs("feedback-quality"), looked_at) if result.variant]
    if not any(result.is_taught for result in ran):
        return []
    made: list[Figure | None] = []
    for quantity, title in _QUALITIES.items():
        curves = [curve for result in ran if (curve := _diagnosed(result, quantity))]
        made.append(
            Figure(
                f"feedback-{quantity}",
                f"{title} over training, width {ran[0].config.width}",
                "Epoch",
                title,
                tuple(curves),
                "Of one step's estimate against the true gradient, mean over the hidden layers and the seeds.",
                log_y=quantity != "cosine",
            )
        )
    return made


def _diagnosed(result: Result, quantity: str) -> Curve | None:
    assert result.variant is not None
    found: dict[float, list[float]] = {}
    for run in result.variant.runs:
        for entry in run.diagnostics:
            hidden = list(entry["sites"].values())[:-1]
            values = [site[quantity] for site in hidden if site.get(quantity) is not None]
            if values:
                found.setdefault(entry["epoch"], []).append(statistics.fmean(values))
    epochs = sorted(found)
    if not epochs:
        return None
    return Curve(result.label, epochs, [statistics.fmean(found[e]) for e in epochs], result.config.method, markers=True)


def _over_epochs(results: Sequence[Result]) -> list[Figure | None]:
    """The deepest network, one figure for each learning rate: the mean over the seeds, and their range."""
    ran = [result for result in results if result.variant and any(run.history for run in result.variant.runs)]
    deepest = max((result.config.depth for result in ran), default=0)
    ran = [result for result in ran if result.config.depth == deepest]
    return [
        Figure(
            slugify(f"feedback depth {deepest} lr {rate:g}"),
            f"Depth {deepest}, learning rate {rate:g}",
            "Epoch",
            "Train accuracy",
            tuple(curve for result in ran if result.config.lr == rate for curve in _training(result)),
            "Mean over the seeds, and their range. Dips inside the band are single seeds.",
            y_range=(0.0, 1.05),
        )
        for rate in sorted({result.config.lr for result in ran})
    ]


def _training(result: Result, quantity: str = "train_accuracy") -> Iterable[Curve]:
    assert result.variant is not None
    dashed = result.config.sweeps > 1 or result.config.every > 1
    curve = epoch_curve(result.variant, quantity, result.label, result.config.method, dashed)
    return [curve] if curve else []


def _dots(results: Sequence[Result]) -> Figure | None:
    """A line per ablation, with dots for the means and bars for the spread of the seeds."""
    ran = [result for result in results if result.variant]
    if not any(result.is_taught for result in ran):
        return None
    ran.sort(key=lambda result: -(result.ours("train_accuracy").mean))  # type: ignore[union-attr]
    curves = []
    for quantity, dashed in zip(QUANTITIES, (False, True), strict=True):
        found = [(i, summary) for i, result in enumerate(ran) if (summary := result.ours(quantity))]
        curves.append(
            Curve(
                f"{QUANTITIES[quantity]} accuracy",
                [summary.mean for _, summary in found],
                [float(i) for i, _ in found],
                "feedback-chained" if quantity == "train_accuracy" else "wperp",
                low=[summary.mean - (summary.sd or 0.0) for _, summary in found],
                high=[summary.mean + (summary.sd or 0.0) for _, summary in found],
                dashed=dashed,
                dots=True,
            )
        )
    return Figure(
        "feedback-ablations",
        f"Ablations at width {ran[0].config.width}",
        "Accuracy",
        "",
        tuple(curves),
        "Mean over the seeds; bars of one standard deviation. The best on the training data is on top.",
        y_names=tuple(result.label for result in ran),
    )
