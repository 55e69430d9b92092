"""The experiments of the paper as lists of runs, one entry per table or figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gradguess.errors import InputError
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.names import lookup
from gradguess.experiments.real import RATES, real

Runs = list[TrainConfig]
DIAGNOSE = 100  # epochs; the same in every preset, so that presets share their runs
SCALING_METHODS = ("weight", "activation", "wt", "wperp", "backprop")


@dataclass(frozen=True)
class Preset:
    """How much of each experiment is run."""

    widths: tuple[int, ...]
    seeds: int  # unless another number is asked for
    heavy: bool  # whether runs that take an hour on a CPU belong to it
    wide: tuple[int, ...] = ()  # further widths for the study of learned feedback
    samples: int = 0  # of real data to train on; 0: all
    rates: tuple[float, ...] = RATES  # learning rates of networks on real data

    def near(self, *wanted: int) -> tuple[int, ...]:
        """The wanted widths that this preset has, or its largest if it has none of them."""
        return tuple(width for width in wanted if width in self.widths) or (max(self.widths),)


PRESETS = {
    "quick": Preset(widths=(64, 128), seeds=1, heavy=False, samples=2000, rates=(1e-3,)),
    "paper": Preset(widths=(64, 128, 256, 512), seeds=3, heavy=True, wide=(1024, 2048, 4096)),
}


def choice_of_k(preset: Preset) -> Runs:
    """W⊥ for several k against W^T."""
    kinds = [TrainConfig(method="wt")] + [TrainConfig(method="wperp", k=k) for k in ("rank", 25, 10, 1)]
    return [replace(kind, width=width) for width in preset.near(128) for kind in kinds]


def overlap(preset: Preset) -> Runs:
    """How much of the true gradient lies in the top-k subspace, layer by layer."""
    return [TrainConfig(method="wperp", width=width, diagnose=DIAGNOSE) for width in preset.near(128, 512)]


def bias_variance(preset: Preset) -> Runs:
    """Bias, variance and covariance norm of W^T, W⊥-bottom and W⊥."""
    return [
        TrainConfig(method=method, width=width, diagnose=DIAGNOSE)
        for width in preset.near(128)
        for method in ("wt", "wperp-bottom", "wperp")
    ]


def scaling(preset: Preset) -> Runs:
    """Accuracy of five methods as the width grows."""
    return [TrainConfig(method=method, width=width) for width in preset.widths for method in SCALING_METHODS]


def newton_schulz(preset: Preset) -> Runs:
    """W⊥-NS against W⊥ and W^T: accuracy, time, memory."""
    return [
        TrainConfig(method=method, width=width)
        for width in preset.near(128, 512)
        for method in ("wperp-ns", "wperp", "wt")
    ]


def preconditioning(preset: Preset) -> Runs:
    """W^P, unbiased and noisy, against W⊥ and W^T."""
    return [
        TrainConfig(method=method, width=width, diagnose=DIAGNOSE)
        for width in preset.near(256)
        for method in ("wperp", "wp", "wt")
    ]


FEEDBACK = (
    TrainConfig(method="backprop"),
    TrainConfig(method="feedback-direct"),
    TrainConfig(method="feedback-chained"),
)


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
    kinds = [TrainConfig(method=form, diagnose=25) for form in forms]
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


def real_networks(preset: Preset) -> Runs:
    """Convolutional, residual and attention networks on images and text (`gradguess.experiments.real`)."""
    return real(seeds=1, rates=preset.rates, samples=preset.samples)


BEYOND: dict[str, Callable[[Preset], Runs]] = {
    "feedback-width": feedback_width,
    "feedback-depth": feedback_depth,
    "feedback-residual": feedback_residual,
    "feedback-quality": feedback_quality,
    "feedback-ablations": feedback_ablations,
    "real": real_networks,
}

PAPER: dict[str, Callable[[Preset], Runs]] = {
    "choice-of-k": choice_of_k,
    "overlap": overlap,
    "bias-variance": bias_variance,
    "scaling": scaling,
    "newton-schulz": newton_schulz,
    "preconditioning": preconditioning,
}


EXPERIMENTS = PAPER | BEYOND


def plan(
    preset: str = "quick",
    only: Iterable[str] = (),
    seeds: int | None = None,
    solver: str | None = None,
    device: str | None = None,
) -> dict[str, Runs]:
    """The runs of each experiment; a run that two experiments share is the same record in both."""
    chosen = lookup(PRESETS, preset, "preset")
    asked = [name for item in only for name in (BEYOND if item == "beyond" else (item,))]
    for name in asked:
        lookup(EXPERIMENTS, name, "experiment")
    count = chosen.seeds if seeds is None else seeds
    if count < 1:
        raise InputError(f"seeds must be at least 1, found {count}.")
    overrides = {name: value for name, value in (("solver", solver), ("device", device)) if value is not None}
    runs = {
        name: [
            replace(config, seed=seed, **overrides)  # type: ignore[arg-type]
            for seed in range(count)
            for config in build(chosen)
            if chosen.heavy or name in asked or not is_heavy(config)
        ]
        for name, build in EXPERIMENTS.items()
    }
    shared = _shared(runs)  # over all experiments, so that a run is the same when one experiment alone is asked for
    return {name: shared[name] for name in asked or PAPER}


def _shared(runs: dict[str, Runs]) -> dict[str, Runs]:
    """Diagnosing does not change a run, so one that any experiment diagnoses is diagnosed in all, and run once."""
    looked_at: dict[TrainConfig, int] = {}
    for config in (config for configs in runs.values() for config in configs):
        plain = replace(config, diagnose=0)
        looked_at[plain] = max(looked_at.get(plain, 0), config.diagnose)
    return {
        name: [replace(config, diagnose=looked_at[replace(config, diagnose=0)]) for config in configs]
        for name, configs in runs.items()
    }


def is_heavy(config: TrainConfig) -> bool:
    """Runs that decompose a matrix of full size per sample and step: seconds per step where others take ms.

    A quick preset leaves them out unless their experiment is asked for by name.
    """
    exact = config.method in ("wperp", "wperp-bottom") and config.solver == "svd"
    return config.method == "wperp-ns" or exact


def unique(runs: dict[str, Runs]) -> Runs:
    """Every run once, expensive ones first so that no process is left alone with the longest at the end."""
    configs = {config.key: config for configs in runs.values() for config in configs}
    return sorted(configs.values(), key=cost, reverse=True)


def cost(config: TrainConfig) -> float:
    """Roughly how much work a run is. Only the order of the runs and the time left depend on it."""
    size = config.depth * config.width**2 + 6e4
    return config.epochs * size * _factor(config)


def _factor(config: TrainConfig) -> float:
    if is_heavy(config):
        return 300.0 if config.method == "wperp-ns" else 130.0
    return 4.0 if config.method == "wp" else 1.0
