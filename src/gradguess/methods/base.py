"""What a method is: anything that estimates a gradient from the passes of one step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradguess.errors import NonFiniteError
from gradguess.guesses.base import Guess
from gradguess.step.base import State, Step


@dataclass
class Estimate:
    """The gradient as a method estimated it, and how.

    Attributes:
        loss: mean loss, 0-dim.
        grads: estimated gradient of the mean loss by parameter name, but for what went to `Step.into`.
        jvp: (tangents, batch), the directional derivative of each sample's own loss.
        directions: site name -> (tangents, *shape of the output).
        site_grads: site name -> estimate of d(loss of that sample)/ds, in the shape of the output.
        losses: (batch,), one per sample.
        pooled: the gradients are of all processes' samples already.
        all_finite: False where some process met NaN or infinity; None where each speaks for itself.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    jvp: Tensor
    directions: dict[str, Tensor] = field(default_factory=dict)
    site_grads: dict[str, Tensor] = field(default_factory=dict)
    losses: Tensor = field(kw_only=True)
    pooled: bool = False
    all_finite: Tensor | None = None

    def is_finite(self) -> bool:
        """Whether all losses, derivatives and gradients are numbers. It waits for a GPU once."""
        if self.all_finite is not None and not bool(self.all_finite):
            return False  # the processes must not differ in this
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in self.grads.values():
            values = grad._values() if grad.is_sparse else grad
            groups.setdefault((values.device, values.dtype), []).append(values)
        sums = [torch.stack(torch._foreach_norm(group)).sum() for group in groups.values()]
        if self.all_finite is None:
            sums += [self.losses.sum(), self.jvp.sum()]
        total = sum(one.to(self.losses.device, torch.float64) for one in sums)
        return math.isfinite(float(total)) or self._not_finite() is None  # numbers may have had an infinite sum

    def check_finite(self, where: str) -> None:
        """Raise an error that says what is not, and where."""
        if self.is_finite():
            return
        what = self._not_finite()
        if what is None:
            raise NonFiniteError(f"Another process met a NaN or infinite loss or derivative at {where}; see its error.")
        raise NonFiniteError(
            f"The {what} at {where} is NaN or infinite. Check the data and the learning rate, or skip such steps with "
            "gg.ForwardGradient(..., nonfinite='skip')."
        )

    def _not_finite(self) -> str | None:
        """The first quantity that is not finite; None if there is none, or if another process has it."""
        for name, numbers in (("loss", self.losses), ("directional derivative", self.jvp)):
            bad = int((~numbers.isfinite()).sum())
            if bad:
                return f"{name} of {bad} sample(s)"
        for name, grad in self.grads.items() if self.all_finite is None or bool(self.all_finite) else ():
            if not (grad._values() if grad.is_sparse else grad).isfinite().all():
                return f"gradient of {name!r}, though no loss and no derivative is,"
        return None


@dataclass(frozen=True)
class Draws:
    """The guess that draws directions in a step.

    Attributes:
        guess: the guess.
        count: the number of steps in which it has drawn before.
        fraction: the part of the batch that carries them.
    """

    guess: Guess
    count: int
    fraction: float = 1.0


class Method(ABC):
    """Anything that estimates a gradient: a guess, weight perturbation, learned feedback, backpropagation."""

    uses_sites: ClassVar[bool] = True
    apart: ClassVar[bool] = False  # it takes a sample's activations to move that sample's own loss alone
    one_pass: bool = False  # a step runs the model once, where what the pass saw is kept

    def draws(self, count: int) -> Draws | None:
        """The guess that draws directions at sites in step `count`, or None where nothing is drawn."""
        return None

    def kind(self, count: int) -> str | None:
        """Steps of one kind do the same operations on the same shapes, so that one of them can be recorded for all.

        None: what step `count` does depends on the numbers that it meets.
        """
        drawn = self.draws(count)
        if drawn is None:
            return "plain"
        if not drawn.guess.steady:
            return None
        return "refresh" if drawn.guess.searches and drawn.count % drawn.guess.refresh == 0 else "step"

    @abstractmethod
    def run(self, step: Step) -> tuple[Estimate, State]:
        """The gradient of one batch, and the state that it leaves."""
