"""Forms: how predictions `h` become the estimate `ĝ`.

    direct       ĝ_i = h_i
    chained      ĝ_i = Σ_j W̃_ijᵀ h_j       over the sites j above, exact at the output: Wᵀ with what was learned in
                                           the place of its noise
    corrected    ĝ_i = h_i + r y_i         with the residual r = c - Σ_i <y_i, h_i>

To add a form: a class here, or in a file of its own, and its line in `FORMS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from gradguess.methods.feedback.forward import Forward, Values
from gradguess.methods.feedback.lesson import Lesson
from gradguess.methods.feedback.predictor import Predictor
from gradguess.methods.output_error import OutputError
from gradguess.model.site import Layout, Site

if TYPE_CHECKING:
    from gradguess.methods.feedback.feedback import Feedback


class Form(ABC):
    """One way from predictions to estimates.

    Attributes:
        chained: the chain rule is applied to the predictions, so that sites wait for those above them.
        corrects: what the tangents say against the prediction is added to it.
    """

    chained = corrects = False

    def reads(self, site: Site, layout: Layout) -> bool:
        """Is the prediction at this site used?"""
        return True

    def at_site(
        self,
        predictor: Predictor,
        site: Site,
        gate: Tensor | None,
        d: int,
        error: OutputError,
        lesson: Lesson | None = None,
        y: Tensor | None = None,
    ) -> Tensor:
        """Learn from the lesson, if there is one, and predict: `h_i`. A correction is to what was predicted before."""
        if lesson is None or y is None:
            return predictor.predict(site, gate, d, error)
        before = predictor.predict(site, gate, d, error) + lesson.correction(site, y) if self.corrects else None
        lesson.learn(site, y, gate)
        return predictor.predict(site, gate, d, error) if before is None else before

    @abstractmethod
    def combine(
        self, method: Feedback, forward: Forward, predictor: Predictor, h: Values, error: OutputError
    ) -> Values:
        """The estimate at every site, where a pass is kept."""


class Direct(Form):
    """The prediction itself. The cheapest form."""

    def combine(
        self, method: Feedback, forward: Forward, predictor: Predictor, h: Values, error: OutputError
    ) -> Values:
        return h | forward.exact_tops(error)


class Corrected(Direct):
    """The prediction and what the tangents say against it: bias and variance shrink as the predictor learns."""

    corrects = True


class Chained(Form):
    """The chain rule applied to the predictions of the sites above, `sweeps` times."""

    chained = True

    def reads(self, site: Site, layout: Layout) -> bool:
        return any(site.name in below.above for below in layout.sites)

    def combine(
        self, method: Feedback, forward: Forward, predictor: Predictor, h: Values, error: OutputError
    ) -> Values:
        g = h
        for _ in range(method.sweeps):
            g = forward.chain(g, error)
        if method.bootstrap:
            for site in forward.step.layout.guessed:
                predictor.regress(site, forward.gate(site), error, g[site.name], method.bootstrap)
        return g


FORMS: dict[str, Form] = {"direct": Direct(), "chained": Chained(), "corrected": Corrected()}
