"""The experiments of the paper as lists of runs, one entry per table or figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gradguess.errors import InputError
from gradguess_lab.beyond import BEYOND
from gradguess_lab.config import TrainConfig
from gradguess_lab.names import lookup
from gradguess_lab.presets import DIAGNOSE, PRESETS, Preset, Runs


def _perp(preset: Preset, **options: Any) -> Runs:
    """W⊥ by each solver of the preset."""
    return [TrainConfig(**({"method": "wperp", "solver": solver} | options)) for solver in preset.solvers]


def choice_of_k(preset: Preset) -> Runs:
    """W⊥ for several k against Wᵀ."""
    kinds = [TrainConfig(method="wt")]
    kinds += [kind for k in ("rank", 25, 10, 1) for kind in _perp(preset, k=k)]
    return [replace(kind, width=width) for width in preset.near(128) for kind in kinds]


def overlap(preset: Preset) -> Runs:
    """How much of the true gradient lies in the top-k subspace, layer by layer."""
    return [kind for width in preset.near(128, 512) for kind in _perp(preset, width=width, diagnose=DIAGNOSE)]


def bias_variance(preset: Preset) -> Runs:
    """Bias, variance and covariance norm of Wᵀ, W⊥-bottom and W⊥; backpropagation, to see them on its network too."""
    kinds = [TrainConfig(method=method) for method in ("wt", "wperp-bottom", "backprop")] + _perp(preset)
    return [replace(kind, width=width, diagnose=DIAGNOSE) for width in preset.near(128) for kind in kinds]


def scaling(preset: Preset) -> Runs:
    """Accuracy of five methods as the width grows; bias and variance of those that differ in them."""
    plain = [TrainConfig(method=method) for method in ("weight", "activation", "backprop")]
    judged = [replace(kind, diagnose=DIAGNOSE) for kind in [TrainConfig(method="wt"), *_perp(preset)]]
    return [replace(kind, width=width) for width in preset.widths for kind in plain + judged]


def newton_schulz(preset: Preset) -> Runs:
    """W⊥-NS against W⊥ and Wᵀ: accuracy, time, memory. With the paper's threshold, and with the one that is placed."""
    kinds = [TrainConfig(method="wperp-ns", threshold=threshold) for threshold in ("nearest", "placed")]
    kinds += [*_perp(preset), TrainConfig(method="wt")]
    return [replace(kind, width=width) for width in preset.near(128, 512) for kind in kinds]


def preconditioning(preset: Preset) -> Runs:
    """Wᴾ, unbiased and noisy, against W⊥ and Wᵀ."""
    kinds = [*_perp(preset), TrainConfig(method="wp"), TrainConfig(method="wt")]
    return [replace(kind, width=width, diagnose=DIAGNOSE) for width in preset.near(256) for kind in kinds]


def scripts(preset: Preset) -> Runs:
    """What the authors' scripts do and the paper does not say, where our numbers differ (`experiments.scripts`)."""
    if not preset.heavy:
        return []
    perp: dict[str, Any] = {"method": "wperp", "solver": preset.solvers[0]}
    kinds = [
        TrainConfig(method="wt", width=width, script="mask", diagnose=DIAGNOSE) for width in preset.near(128, 256, 512)
    ]
    kinds += [TrainConfig(**perp, width=width, script="mask", diagnose=DIAGNOSE) for width in preset.widths]
    kinds += [TrainConfig(**perp, width=width, k=1, script="mask") for width in preset.near(128)]
    kinds += [
        TrainConfig(method="wperp-bottom", width=width, script=script, diagnose=DIAGNOSE)
        for width in preset.near(128)
        for script in ("mask", "bottom", "mask,bottom")
    ]
    kinds += [
        TrainConfig(method="wperp-ns", threshold="nearest", width=width, script=script)
        for width in preset.near(128, 512)
        for script in ("mask", "floor", "mask,floor")
    ]
    return kinds


PAPER: dict[str, Callable[[Preset], Runs]] = {
    "choice-of-k": choice_of_k,
    "overlap": overlap,
    "bias-variance": bias_variance,
    "scaling": scaling,
    "newton-schulz": newton_schulz,
    "preconditioning": preconditioning,
    "scripts": scripts,
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
    looked_at: dict[TrainConfig, str] = {}
    for config in (config for configs in runs.values() for config in configs):
        plain = replace(config, diagnose="")
        looked_at[plain] = max(looked_at.get(plain, ""), config.diagnose, key=len)
    return {
        name: [replace(config, diagnose=looked_at[replace(config, diagnose="")]) for config in configs]
        for name, configs in runs.items()
    }


def is_heavy(config: TrainConfig) -> bool:
    """Runs that decompose a matrix of full size per sample and step: seconds per step where others take ms.

    A quick preset leaves them out unless their experiment is asked for by name.
    """
    own = config.method in ("wperp", "wperp-bottom") and config.solver != "shared"
    return config.method == "wperp-ns" or own


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
