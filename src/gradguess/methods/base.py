"""What a method is: anything that estimates a gradient from the passes of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

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
    apart: ClassVar[bool] = False  # does it take a sample's activations to move that sample's own loss alone?
    one_pass: bool = False  # does a step run the model once, where what the pass saw is kept?

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
