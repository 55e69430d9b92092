"""Learned feedback with activation memory that does not grow with depth (`memory="replay"`).

The first pass keeps nothing of a layer: what the predictor explains of the outputs' tangents is summed as the
directions are carried (`Lesson.observe`). Then the residual and the error `e` are known, and a second pass meets each
site again with the same direction: there the site learns, predicts, and pulls its estimate back to its parameters.

    direct, corrected    any model: the estimate at a site needs that site alone
    chained              wherever sites follow one another in a line (layers in a row, `sites=n`): the last `sweeps`
                         sites wait for the predictions above them, with the pieces of the graph between. Where a site
                         reaches several others (branches) it would need a graph of all layers: refused
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.methods.base import Estimate
from gradguess.methods.feedback.forms import FORMS
from gradguess.methods.feedback.forward import is_closed
from gradguess.methods.feedback.lesson import Lesson
from gradguess.methods.feedback.predictor import Predictor
from gradguess.methods.feedback.scattered import Scattered
from gradguess.methods.feedback.waiting import ClosedChain, GraphChain
from gradguess.methods.output_error import OutputError
from gradguess.model.hooks import Visit
from gradguess.model.site import Site
from gradguess.step.base import Step
from gradguess.step.draw import Drawing
from gradguess.step.measure import Measurement, measure
from gradguess.step.pull_back import Gradients

if TYPE_CHECKING:
    from gradguess.methods.feedback.feedback import Feedback


class Replay:
    """One step of `Feedback` in two passes."""

    def __init__(self, method: Feedback, step: Step, predictor: Predictor, teaches: bool) -> None:
        self.method, self.step, self.predictor = method, step, predictor
        self.form = FORMS[method.form]
        self.closed = is_closed(step.layout, self.form.chained)
        if self.form.chained and not self.closed and not step.layout.in_a_line:
            raise InputError(
                "Feedback(form='chained') with memory='replay' needs sites that follow one another in a line, and this "
                "model has sites that reach several others: it would have to keep every layer. Cut the model into "
                "pieces (sites=4 for instance), or use memory='store' or form='direct'."
            )
        self.teaches = teaches
        self.lesson: Lesson | None = None
        self.drawing: Drawing | None = None
        self.gradients = Gradients(step)

    def run(self) -> Estimate:
        step, whole = self.step, self.method.fraction == 1
        seen = None
        if self.teaches and whole:
            self.drawing, self.lesson, seen = self._measure(step)
        outputs = step.passes.plain(lambda site, x, s: None) if seen is None else seen.outputs
        self.error = OutputError(step.task, outputs)
        losses = self.error.losses if seen is None else seen.losses
        if self.lesson is not None and seen is not None:
            self.lesson.conclude(seen, self.error)
        elif self.teaches:
            self._teach_part(self.method.part_of(step))
        self.batch = len(losses)
        jvp = losses.new_zeros(0, self.batch) if seen is None else seen.jvp
        step.begin(losses, jvp)
        if self.lesson is not None:
            step.noise.rewind()
        self._second_pass()
        return Estimate(losses.mean(), self.gradients.by_name, jvp, losses=losses)

    # --- the first pass --------------------------------------------------------------------------------------

    def _measure(self, step: Step) -> tuple[Drawing, Lesson, Measurement]:
        drawing = Scattered(step, self.method.guess)
        lesson = self.method.new_lesson(step, self.predictor)
        return drawing, lesson, measure(drawing, lambda site: site.guessed, balance=True, watch=lesson.observe)

    def _teach_part(self, step: Step) -> None:
        """A lesson from part of the batch, in two passes of its own."""
        drawing, lesson, seen = self._measure(step)
        lesson.conclude(seen, OutputError(step.task, seen.outputs))
        step.noise.rewind()

        def learn(site: Site, x: Any, s: Tensor) -> None:
            if site.guessed:
                gate = site.gate_at(s)
                lesson.learn(site, drawing.directions(site, s, gate), gate)

        step.passes.plain(learn)

    # --- the second pass -------------------------------------------------------------------------------------

    def _second_pass(self) -> None:
        passes = self.step.passes
        if self.form.chained and self.closed:
            passes.plain(ClosedChain(self).observe)
        elif self.form.chained:
            pieces = GraphChain(self)
            self._with_graph(pieces.visit, pieces.end)
        elif self.closed:
            passes.plain(self._observe)
        else:
            self._each_alone()

    def learn_and_predict(self, site: Site, s: Tensor, gate: Tensor | None) -> Tensor:
        """`h` at a site that is met again, after it has learned."""
        y = None if self.drawing is None else self.drawing.directions(site, s, gate)
        return self.form.at_site(self.predictor, site, gate, site.flat(s).shape[1], self.error, self.lesson, y)

    def _observe(self, site: Site, x: Any, s: Tensor) -> None:
        g = self.learn_and_predict(site, s, site.gate_at(s)) if site.guessed else self.error.exact
        self.gradients.add_site(site, x, s, site.unflat(g, s) / self.batch)

    def _each_alone(self) -> None:
        """Each site's own piece of the graph is differentiated as soon as it is complete, then freed."""
        exact: list[tuple[Site, Tensor, Tensor]] = []

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            if not site.guessed:  # its gradient follows from the error, when the pass has ended
                leaf = s.detach().requires_grad_()
                exact.append((site, s, leaf))
                return leaf.clone()
            with torch.no_grad():
                g = self.learn_and_predict(site, s.detach(), site.gate_at(s.detach()))
            self.gradients.add_vjp(site.parameters, s, site.unflat(g / self.batch, s))
            return s.detach()

        def end(outputs: Any) -> None:
            grads = self.error.pull(outputs, [leaf for _, _, leaf in exact])
            for (site, s, _), grad in zip(exact, grads, strict=True):
                self.gradients.add_vjp(site.parameters, s, grad / self.batch)

        self._with_graph(visit, end)

    def _with_graph(self, visit: Visit, end: Any) -> None:
        """A pass with a reverse graph; `end(outputs)` when it is over."""
        outputs, losses = self.step.passes.graph(visit)
        end(outputs)
        self.gradients.add_tail(losses)
