"""Lightning: estimated gradients under manual optimisation.

    class Model(ForwardGradientMixin, L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = ...
            self.guess_with(self.net, gg.WPerp())

        def training_step(self, batch, batch_idx):
            return self.forward_step(per_sample_loss, *batch)

The mixin turns automatic optimisation off (Lightning would call `backward`), steps optimisers and schedulers, and saves
the state of the estimator with the checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess.estimate import ForwardGradient
from gradguess.methods import Method
from gradguess.model.task import LossFn

KEY = "gradguess"  # of a checkpoint


class ForwardGradientMixin:
    """For a `LightningModule`: list it first among the bases."""

    automatic_optimization = False

    def guess_with(self, model: nn.Module, guess: Method, **options: Any) -> None:
        """Choose what is trained and how; `options` are those of `gg.ForwardGradient`."""
        self._guess = model, guess, options
        self._forward: ForwardGradient | None = None
        self._stored: dict[str, Tensor] | None = None

    @property
    def estimator(self) -> ForwardGradient:
        """Made at the first step, when Lightning has moved the model to its device."""
        if not hasattr(self, "_guess"):
            raise InputError("Call self.guess_with(model, gg.WPerp()) in __init__ before the first step.")
        if self._forward is None:
            model, guess, options = self._guess
            self._forward = ForwardGradient(model, guess, **options)
            if self._stored is not None:
                self._forward.load_state_dict(self._stored)
        return self._forward

    def forward_step(self, loss_fn: LossFn, inputs: Any, targets: Any) -> Tensor:
        """One training step: estimate, optimiser, scheduler. Returns the mean loss."""
        optimisers = _listed(self.optimizers())  # type: ignore[attr-defined]
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = self.estimator(loss_fn, inputs, targets)
        for optimiser in optimisers:
            optimiser.step()
        for scheduler in _listed(self.lr_schedulers()):  # type: ignore[attr-defined]
            scheduler.step()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        if self._forward is not None:
            checkpoint[KEY] = self._forward.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        self._stored = checkpoint.get(KEY)
        if self._stored is not None and self._forward is not None:
            self._forward.load_state_dict(self._stored)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


__all__ = ["ForwardGradientMixin"]
