"""A callback of Lightning that logs how good the estimates are while a network trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import gradguess as gg
from gradguess.errors import check_count, require

Callback: Any = require("lightning.pytorch.callbacks", "gradguess[lightning]", "EstimateQuality").Callback
NUMBERS = ("cosine", "bias", "variance")


class EstimateQuality(Callback):
    """Logs `cosine/<site>`, `bias/<site>` and `variance/<site>` of the estimate against the true gradient.

    It is for a module with `ForwardGradientMixin`. A measurement is a `gg.diagnose` of the batch that was just used: it
    needs a backward pass and, for methods without a closed form, `draws` estimates. The whole of the last one is
    `report`. It goes to the loggers themselves: `self.log` would repeat it at every step until the epoch ends.

    Args:
        every: steps from one measurement to the next. The first is at the first step.
        draws: estimates that bias and variance are taken from where there is no closed form.
        seed: of the directions that are drawn for the measurement. Training draws its own.
    """

    def __init__(self, every: int = 100, draws: int = 8, seed: int = 0) -> None:
        check_count("every", every)
        check_count("draws", draws, least=2)
        self.every, self.draws, self.seed = every, draws, seed
        self.report: Mapping[str, gg.SiteReport] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(pl_module, "diagnose_step"):
            raise gg.InputError("EstimateQuality: expected a module with ForwardGradientMixin among its bases.")
        steps = pl_module.estimator.steps
        if (steps - 1) % self.every:
            return
        generator = torch.Generator(pl_module.estimator.generator.device).manual_seed(self.seed + steps)
        self.report = pl_module.diagnose_step(generator=generator, draws=self.draws, curve=False)
        row = {f"{name}/{site}": getattr(one, name) for site, one in self.report.items() for name in NUMBERS}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=steps - 1)
