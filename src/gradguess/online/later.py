"""Learning from the loss of a step: at once by `learn`, or when the loss arrives by `Later`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradguess.backends.policy import one_at_a_time
from gradguess.errors import NonFiniteError
from gradguess.model.task import LossFn, rows_of
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


def learn(
    rule: Rule, kept: Kept, step: Transition, loss_fn: LossFn, target: Any, streams: int
) -> tuple[Tensor, Tensors, Error | None, int]:
    """Mean loss, gradients, the error at the state, and the number of streams whose loss was not finite.

    `target` has a row for each of the `streams` that there are in all; `kept` is that of the streams of the step.
    """
    if step.index is not None:
        target = rows_of(target, step.index, streams)
    loss, grads, error, bad = step.differentiated(loss_fn, target)
    if error is None:
        return loss, grads, error, bad
    for name, credit in rule.credit(kept, error, step).items():
        grads[name] = grads[name] + credit.view_as(grads[name]).to(grads[name])
    if not bool(torch.stack([torch.isfinite(grad).all() for grad in grads.values()]).all()):
        raise NonFiniteError(
            f"The gradient at step {step.count} is NaN or infinite: the influence of the past has grown beyond all "
            "bounds, or the loss has. Nothing was changed. Lower the learning rate, or forget the past by reset()."
        )
    return loss, grads, error, bad


def write(model: nn.Module, grads: Mapping[str, Tensor]) -> None:
    """Add to `.grad`."""
    for name, grad in grads.items():
        p = model.get_parameter(name)
        p.grad = grad.detach().clone() if p.grad is None else p.grad + grad


class Later:
    """A step that waits for its loss. It holds the weights and the influence of its own step: one more of each.

    Calling it adds the gradient to `.grad`, as if the loss had been there at the step.
    """

    def __init__(
        self, rule: Rule, kept: Kept, step: Transition, streams: int, learned: Callable[[Error, Transition], None]
    ) -> None:
        self.rule, self.kept, self.step, self.streams, self._learned = rule, kept, step, streams, learned

    @property
    def output(self) -> Any:
        """The output of the step, of the streams that were not skipped."""
        return self.step.output

    @one_at_a_time
    def __call__(self, loss_fn: LossFn, target: Any) -> Tensor:
        """Add the gradient to `.grad`, and return the mean loss.

        Args:
            loss_fn: `loss_fn(output, target)` returns one loss per stream.
            target: of the loss.
        """
        loss, grads, error, _ = learn(self.rule, self.kept, self.step, loss_fn, target, self.streams)
        write(self.step.model, grads)
        if error is not None:
            self._learned(error, self.step)
        return loss
