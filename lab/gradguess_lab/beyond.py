"""Experiments that go beyond the paper: learned feedback, other networks, and the definition of W⊥ itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradguess_lab.config import TrainConfig
from gradguess_lab.presets import DIAGNOSE, Preset, Runs
from gradguess_lab.real import real

FEEDBACK = (
    TrainConfig(method="backprop"),
    TrainConfig(method="feedback-direct"),
    TrainConfig(method="feedback-chained"),
)

GUESSED = tuple(TrainConfig(method=method) for method in ("wperp", "wt", "activation"))


def exact_top(preset: Preset) -> Runs:
    """Guesses that take the known derivative of the loss at the output, and draw nothing there."""
    return [replace(kind, width=width, top="exact") for width in preset.widths for kind in GUESSED]


def feedback_width(preset: Preset) -> Runs:
    """Learned feedback against backpropagation as the width grows; rare tangents; tuned learning rates."""
    kinds = [
        *FEEDBACK,
        TrainConfig(method="feedback-corrected"),
        TrainConfig(method="feedback-direct", every=4, fraction=0.25),
        TrainConfig(method="feedback-chained", every=4, fraction=0.25),
    ]
    runs = [replace(kind, width=width) for width in preset.widths for kind in kinds]
    wide = [replace(kind, width=width) for width in preset.wide for kind in FEEDBACK]
    tuned = [
        replace(kind, width=width, schedule="cosine", lr=lr)
        for width in preset.near(512)
        for lr in (3e-4, 1e-3, 3e-3)
        for kind in FEEDBACK
    ]
    return runs + wide + tuned


def feedback_depth(preset: Preset) -> Runs:
    """The same as the depth grows, at three learning rates; two sweeps beside one, and four pieces."""
    kinds = [
        *FEEDBACK,
        TrainConfig(method="feedback-chained", sweeps=2),
        TrainConfig(method="feedback-chained", sites="4"),
    ]
    return [
        replace(kind, width=width, depth=depth, lr=lr)
        for width in preset.near(512)
        for depth, rates in ((6, (1e-4,)), (12, (1e-4, 3e-4, 1e-3)))
        for lr in rates
        for kind in kinds
    ]


def feedback_residual(preset: Preset) -> Runs:
    """Residual networks: with `B = 0` at equal sweeps, to show what the one-hop chain rule alone does."""
    chained = TrainConfig(method="feedback-chained")
    kinds = [
        *FEEDBACK,
        replace(chained, learn="never"),
        replace(chained, sweeps=2),
        replace(chained, sweeps=2, learn="never"),
        replace(chained, sweeps=4),
        replace(chained, sweeps=4, learn="never"),
        replace(chained, bootstrap=0.3),
        replace(chained, learn="never", bootstrap=0.3),
    ]
    return [
        replace(kind, model="residual", width=128, depth=depth, epochs=20, batch=128, lr=3e-4)
        for depth in (12, 24)
        for kind in kinds
    ]


def feedback_quality(preset: Preset) -> Runs:
    """How good the estimate is over training, with what feedback has learned until then."""
    forms = ("feedback-direct", "feedback-chained", "feedback-corrected")
    kinds = [TrainConfig(method=form, diagnose="25") for form in forms]
    kinds += [TrainConfig(method=method, diagnose=DIAGNOSE) for method in ("wperp", "wt")]
    return [replace(kind, width=width) for width in preset.near(128) for kind in kinds]


def feedback_ablations(preset: Preset) -> Runs:
    """What a sceptical reader asks for, at width 256."""
    direct, chained = TrainConfig(method="feedback-direct"), TrainConfig(method="feedback-chained")
    both = [
        replace(form, **change)
        for form in (direct, chained)
        for change in (
            {"start": "random", "learn": "never"},  # direct feedback alignment, and its chained form
            {"learn": "truth"},  # the ceiling of the form
            {"learn": "outputs"},
            {"learn": "loss"},
            {"learn": "momentum", "rate": 0.02},  # FDFA's rule
            {"teacher": "wt"},
            {"teacher": "activation"},
        )
    ]
    alone = [
        replace(chained, learn="never"),
        replace(chained, learn="never", bootstrap=0.3),  # synthetic gradients, no tangent
        replace(chained, bootstrap=0.3),  # the same, anchored by tangents
        TrainConfig(method="wperp", balance=True),
        TrainConfig(method="wperp", tangents=10),
        TrainConfig(method="wperp", isolate=True),
    ]
    return [replace(kind, width=width) for width in preset.near(256) for kind in both + alone]


def definition(preset: Preset) -> Runs:
    """W⊥ by the dense SVD of every sample at every step, which defines it: hours on a CPU."""
    return [TrainConfig(method="wperp", solver="svd", width=width, diagnose=DIAGNOSE) for width in preset.near(128)]


def real_networks(preset: Preset) -> Runs:
    """Convolutional, residual and attention networks on images and text (`gradguess_lab.real`)."""
    return real(seeds=1, rates=preset.rates, samples=preset.samples)


BEYOND: dict[str, Callable[[Preset], Runs]] = {
    "definition": definition,
    "exact-top": exact_top,
    "feedback-width": feedback_width,
    "feedback-depth": feedback_depth,
    "feedback-residual": feedback_residual,
    "feedback-quality": feedback_quality,
    "feedback-ablations": feedback_ablations,
    "real": real_networks,
}
