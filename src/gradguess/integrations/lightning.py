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

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

import gradguess as gg

KEY = "gradguess"  # of our state in a checkpoint


class ForwardGradientMixin:
    """For a `LightningModule`: list it first among the bases."""

    automatic_optimization = False

    def guess_with(self, model: nn.Module, guess: Any, **options: Any) -> None:
        """Choose what is trained and how. Call it in `__init__`.

        Args:
            model: the module that is trained, this one or a part of it.
            guess: `gg.WPerp()`, `gg.Feedback(...)`, or any other method.
            options: those of `gg.ForwardGradient`.
        """
        self._guess = model, guess, options
        self._forward: gg.ForwardGradient | None = None
        self._stored: dict[str, Tensor] | None = None
        self._last: tuple[Any, Any, Any] | None = None

    @property
    def estimator(self) -> gg.ForwardGradient:
        """Made at the first step, when Lightning has moved the model to its device."""
        if not hasattr(self, "_guess"):
            raise gg.InputError("Call self.guess_with(model, gg.WPerp()) in __init__ before the first step.")
        if self._forward is None:
            model, guess, options = self._guess
            self._forward = gg.ForwardGradient(model, guess, **options)
            if self._stored is not None:
                self._forward.load_state_dict(self._stored)
        return self._forward

    def forward_step(self, loss_fn: Callable[[Tensor, Tensor], Tensor], inputs: Any, targets: Any) -> Tensor:
        """One training step: estimate, optimisers, schedulers. Returns the mean loss.

        Args:
            loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
            inputs: of the model; a tuple is passed as arguments, a dict as keyword arguments.
            targets: of the loss.
        """
        optimisers = _listed(self.optimizers())  # type: ignore[attr-defined]
        self._last = loss_fn, inputs, targets
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = self.estimator(loss_fn, inputs, targets)
        for optimiser in optimisers:
            optimiser.step()
        for scheduler in _listed(self.lr_schedulers()):  # type: ignore[attr-defined]
            scheduler.step()
        return loss

    def diagnose_step(self, **options: Any) -> Mapping[str, gg.SiteReport]:
        """`gg.diagnose` of a step on the last batch, with what the estimator has learned. Writes nothing.

        Args:
            options: those of `gg.diagnose`.
        """
        if self._last is None:
            raise gg.InputError("There is no batch to diagnose. Call self.forward_step(...) before.")
        forward = self.estimator
        return gg.diagnose(forward.model, forward.guess, *self._last, forward=forward, **options)

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
