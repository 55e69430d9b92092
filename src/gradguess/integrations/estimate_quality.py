"""A callback of Lightning that logs how good the estimates are while a network trains."""

from __future__ import annotations

from typing import Any

import torch

import gradguess as gg
from gradguess.errors import check_count
from gradguess.extras import require

Callback: Any = require("lightning.pytorch.callbacks", "lightning", "EstimateQuality").Callback


class EstimateQuality(Callback):
    """Logs `cosine/<site>`, `bias/<site>` and `variance/<site>` of the estimate against the true gradient.

    It is for a module with `ForwardGradientMixin`. A measurement is a `gg.diagnose` of the batch that was just used: it
    needs a backward pass and, for methods without a closed form, `draws` estimates.

    Args:
        every: steps from one measurement to the next. The first is at the first step.
        draws: estimates that bias and variance are taken from where there is no closed form.
        seed: of the directions that are drawn for the measurement. Training draws its own.
    """

    def __init__(self, every: int = 100, draws: int = 8, seed: int = 0) -> None:
        check_count("every", every)
        check_count("draws", draws, least=2)
        self.every, self.draws, self.seed = every, draws, seed

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(pl_module, "diagnose_step"):
            raise gg.InputError("EstimateQuality: expected a module with ForwardGradientMixin among its bases.")
        steps = pl_module.estimator.steps
        if (steps - 1) % self.every:
            return
        generator = torch.Generator(pl_module.estimator.generator.device).manual_seed(self.seed + steps)
        report = pl_module.diagnose_step(generator=generator, draws=self.draws, curve=False)
        for name in ("cosine", "bias", "variance"):
            pl_module.log_dict({f"{name}/{site}": getattr(one, name) for site, one in report.items()})
