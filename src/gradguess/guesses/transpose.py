"""Wᵀ (Singhal et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Frame, Transposed


@dataclass(frozen=True)
class WTranspose(Guess):
    """White noise at the next sites, pulled back through the Jacobian above.

    Direction `y = W̃ᵀ ε`, `ε ~ N(0, I)`. Covariance `W̃ᵀ W̃` (eq. 6). Bias `(W̃ᵀ W̃ - I) g` (eq. 5).
    Cost: one product with the layer above; on a general graph one cut backward pass per site. Paper: eq. (4).

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WTranspose(), loss_fn, x, t)
    >>> dead = model[0](x) <= 0
    >>> bool((est.directions["0"][0][dead] == 0).all())  # nothing is guessed for units that are off
    True
    """

    def frame(self, view: SiteView) -> Frame:
        return Transposed(view.W, view.output)
