"""Real networks on real data: backpropagation, W⊥ and learned feedback on the same grid of learning rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import settings_of
from gradguess_lab.names import lookup

STUDIED: dict[str, dict[str, Any]] = {
    name: settings_of(name)
    for name in (
        *("backprop", "wperp", "wperp-exact", "feedback-direct", "feedback-chained", "feedback-chained-rare"),
        *("feedback-chained-pieces", "feedback-chained-pieces-zero"),
        *("feedback-chained-bootstrap", "feedback-chained-pieces-bootstrap"),
    )
}
RATES = (3e-4, 1e-3, 3e-3)  # the same grid for every method
SEEDS = 3

_common = TrainConfig(epochs=20, batch=128, eval_every=1, schedule="cosine", rate=0.1)


def _task(**values: Any) -> TrainConfig:
    return dataclasses.replace(_common, **values)


TASKS: dict[str, TrainConfig] = {
    "mlp-mnist": _task(model="mlp", data="mnist", width=256, depth=3, bias=True),
    "cnn-mnist": _task(model="cnn", data="mnist", width=32, depth=3),
    "cnn-fashion-mnist": _task(model="cnn", data="fashion-mnist", width=32, depth=3),
    "resnet-fashion-mnist": _task(model="resnet", data="fashion-mnist", width=32, depth=4),
    "residual-mnist1d": _task(model="residual", data="mnist1d", width=128, depth=12, epochs=40),
    "mixer-mnist": _task(model="mixer", data="mnist", width=64, depth=4, activation="gelu"),
    "vit-mnist": _task(model="vit", data="mnist", width=64, depth=4, activation="gelu"),
    "charformer-shakespeare": _task(
        model="charformer", data="shakespeare", width=128, depth=4, activation="gelu", batch=64
    ),
}


def real(
    only: Iterable[str] = (),
    device: str = "cpu",
    seeds: int = SEEDS,
    rates: Iterable[float] = RATES,
    epochs: int = 0,
    samples: int = 0,
) -> list[TrainConfig]:
    """The runs of the chosen tasks (all by default), for every variant, learning rate and seed.

    With `epochs` or `samples`, so many for each task instead of its own number.
    """
    chosen = [lookup(TASKS, name, "task") for name in only] or list(TASKS.values())
    return [
        dataclasses.replace(
            task,
            lr=lr,
            seed=seed,
            device=device,
            epochs=epochs or task.epochs,
            samples=samples or task.samples,
            **variant,
        )
        for task in chosen
        for seed in range(seeds)
        for lr in rates
        for variant in STUDIED.values()
    ]


_FREE = (
    *("method", "lr", "seed", "device", "epochs", "samples", "learn", "start", "diagnose", "eval_every", "rate"),
    *("sites", "every", "fraction", "bootstrap", "top"),
)


def variant_of(config: TrainConfig) -> str | None:
    """The name in `STUDIED` of what was run; None if it is not there."""
    fields = list(dict.fromkeys(field for variant in STUDIED.values() for field in variant))
    settings = {field: getattr(config, field) for field in fields}
    plain = {field: getattr(_common, field) for field in fields}
    return next((name for name, variant in STUDIED.items() if plain | variant == settings), None)


def task_of(config: TrainConfig) -> str | None:
    """The task of a run, however long it is and whatever part of the data it sees; None if it has none."""
    for name, task in TASKS.items():
        mine = {field: getattr(config, field) for field in _FREE}
        if dataclasses.replace(task, **mine) == config:
            return name
    return None
