"""Activation perturbation (Ren et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Frame, Identity


@dataclass(frozen=True)
class ActivationPerturbation(Guess):
    """White noise at every site, one direction per sample.

    Direction `y ~ N(0, I)`. Covariance `I`. Bias none. Variance grows with the width of the layer.
    Cost: one Gaussian number per activation. Paper: section 2, "Activation perturbation", eq. (3).

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.ActivationPerturbation(), loss_fn, x, t)
    >>> est.directions["0"].shape
    torch.Size([1, 5, 8])
    """

    reads = "never"

    def frame(self, view: SiteView) -> Frame:
        return Identity(view.output)
