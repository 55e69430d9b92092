"""Learning rules: how the residual of a lesson changes the matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradguess.model.site import Site

if TYPE_CHECKING:
    from gradguess.methods.feedback.lesson import Lesson


class Rule(ABC):
    """What a lesson teaches. One object serves all lessons; it keeps nothing."""

    @abstractmethod
    def samples(self, lesson: Lesson) -> Tensor | float:
        """How many samples the lesson is worth; the step size depends on it."""

    @abstractmethod
    def update(self, lesson: Lesson, site: Site, p: int, phi: Tensor, scale: Tensor, B: Tensor) -> Tensor:
        """The new `B` of a site from the regressors `phi` (rows, width of B) that pass `p` carried, scaled by σ."""


class LeastMeanSquares(Rule):
    """`B_i += μ Σ_b w_b φ_i rᵀ` with weights `w_b`.

    The step size is `μ = rate / (λ + K / b)`: λ the largest eigenvalue of the regressors' second moment, K its
    trace over all sites of a pass, b the number of samples. It is the condition under which LMS with Gaussian
    regressors stays stable in the mean square (rate < 2): for W⊥, λ = 1 and μ = rate · b / (b + K).
    """

    def update(self, lesson: Lesson, site: Site, p: int, phi: Tensor, scale: Tensor, B: Tensor) -> Tensor:
        wrong = self.wrong(lesson, lesson.residuals[p], len(phi))
        return B + (lesson.sizes[p] / scale * self.weight(lesson, site)) * lesson.pool.sum(phi.t() @ wrong)

    @abstractmethod
    def wrong(self, lesson: Lesson, residual: Tensor, rows: int) -> Tensor:
        """The residual (batch, C) as the rule weighs it: (rows, columns of B)."""

    @abstractmethod
    def weight(self, lesson: Lesson, site: Site) -> Tensor | float:
        """What the sum over rows is multiplied with."""


class Weighted(LeastMeanSquares):
    """A sample's weight is its squared error |e|², since its prediction is multiplied by its error."""

    def samples(self, lesson: Lesson) -> Tensor:
        power = lesson.power(lesson.own)
        tiny = torch.finfo(power.dtype).tiny
        return lesson.total.square() / lesson.pool.sum(power.square().sum()).clamp_min(tiny)

    def wrong(self, lesson: Lesson, residual: Tensor, rows: int) -> Tensor:
        return residual.reshape(rows, -1) * lesson.power(rows)[:, None]

    def weight(self, lesson: Lesson, site: Site) -> Tensor:
        return 1 / lesson.total


WEIGHTED = Weighted()
