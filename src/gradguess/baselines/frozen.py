"""A control: the last piece is trained, and all below it stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.baselines.local import in_pieces
from gradguess.methods.base import Estimate, Method
from gradguess.step.base import State, Step


@dataclass(frozen=True)
class Frozen(Method):
    """The exact gradient above the last cut, and none below it.

    A method that trains pieces must do better than this, or the pieces below have learned nothing. Parameters below
    the cut get no gradient at all, so that an optimiser leaves them alone. Use it with `sites=n`. Memory and time: a
    pass, and the reverse pass of the last piece.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.Frozen(), sites=2)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> model[0].weight.grad is None, model[2].weight.grad is None
    (True, False)
    """

    one_pass = True

    def run(self, step: Step) -> tuple[Estimate, State]:
        return in_pieces(step, lambda piece: None), step.state
