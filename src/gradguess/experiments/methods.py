"""The one place where the name of a method becomes a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import gradguess as gg
from gradguess.experiments.names import lookup

if TYPE_CHECKING:
    from gradguess.experiments.config import TrainConfig


def subspace_size(config: TrainConfig) -> int:
    """`k="rank"` asks for the whole image of the Jacobian: no rank exceeds the width; guesses clip `k`."""
    return config.width if config.k == "rank" else int(config.k)


def _wperp(config: TrainConfig, end: Literal["top", "bottom"] = "top") -> Any:
    return gg.WPerp(k=subspace_size(config), solver=config.solver, refresh=config.refresh, end=end)


def _feedback(form: Literal["direct", "chained", "corrected"]) -> Callable[[TrainConfig], Any]:
    def build(config: TrainConfig) -> Any:
        return gg.Feedback(
            METHODS[config.teacher](config),
            form=form,
            rate=config.rate,
            every=config.every,
            fraction=config.fraction,
            sweeps=config.sweeps,
            learn=config.learn,  # type: ignore[arg-type]
            bootstrap=config.bootstrap,
            start=config.start,  # type: ignore[arg-type]
        )

    return build


METHODS: dict[str, Callable[[TrainConfig], Any]] = {
    "backprop": lambda config: gg.Backprop(),
    "weight": lambda config: gg.WeightPerturbation(),
    "activation": lambda config: gg.ActivationPerturbation(),
    "wt": lambda config: gg.WTranspose(),
    "wperp": _wperp,
    "wperp-bottom": lambda config: _wperp(config, end="bottom"),
    "wperp-ns": lambda config: gg.WPerpNS(k=subspace_size(config), steps=config.steps, refresh=config.refresh),
    "wp": lambda config: gg.WPreconditioned(sigma=config.sigma),
    "feedback-direct": _feedback("direct"),
    "feedback-chained": _feedback("chained"),
    "feedback-corrected": _feedback("corrected"),
}


def guess_for(config: TrainConfig) -> Any:
    """The guess object that `config` names."""
    return lookup(METHODS, config.method, "method")(config)
