"""Wᴾ: the Jacobian above, preconditioned until the guess is unbiased (the paper's control)."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess.errors import InputError
from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Columns, Frame, Identity
from gradguess.linalg import orthonormal_columns


@dataclass(frozen=True)
class WPreconditioned(Guess):
    """Directions from the polar factor of the Jacobian above.

    Direction `y = (W̃_σᵀ W̃_σ)^{-½} W̃_σᵀ ε = V Uᵀ ε` with `W̃_σ = U (S² + σ)^½ Vᵀ`: the regularised singular
    values cancel, whatever `σ > 0`. So in law `y = V z`. Covariance `V Vᵀ`: the identity, and no bias, wherever `W̃`
    has at least as many rows as columns (there it *is* activation perturbation); else the projector on its
    row space; where `W̃` lacks rank, the directions that an SVD would make up for zero singular values are left
    out. Cost: none, or an orthonormalisation per sample where rows are few. Paper: eqs. (11) to (16).

    Args:
        sigma: the paper's regulariser; it must be positive, and has no other effect on the law.

    >>> import gradguess as gg
    >>> gg.WPreconditioned()
    WPreconditioned(sigma=1e-05)
    """

    sigma: float = 1e-5

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise InputError(f"WPreconditioned(sigma): expected a positive number, found {self.sigma!r}.")

    def frame(self, view: SiteView) -> Frame:
        W = view.W
        if W.m >= W.d:
            return Identity(view.output)
        matrices = W.matrix().expand(view.output.shape[0], -1, -1)
        return Columns(orthonormal_columns(matrices.mT))  # spans what V spans, so has its law
