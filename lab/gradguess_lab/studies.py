"""Ways of teaching feedback that exist to be compared with the library's own: controls, ceilings and rival rules.

`learn` says what teaches the feedback matrices `B`:

- "weighted": the tangents of the outputs, weighted. This is what `gg.Feedback` does by itself.
- "outputs": the same tangents without the weights.
- "loss": the derivative of the loss alone, one number per sample.
- "momentum": a running mean of raw estimates, the rule of FDFA (Bacho and Chu 2024).
- "truth": the true gradient, which shows the ceiling of a form.
- "never": nothing. `B` stays as it started, unless `bootstrap` draws it to the chained estimate.

`start` is "zero", or "random"; random matrices that never learn are direct feedback alignment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import gradguess as gg
from gradguess.baselines.feedback_alignment import Momentum, random_start
from gradguess.methods.base import Draws
from gradguess.methods.feedback.lesson import (
    WEIGHTED,
    LearningRule,
    Lesson,
    Predictor,
    Weighted,
)
from gradguess.model.site import Site
from gradguess.step.base import State, Step
from gradguess.step.pull_back import OutputError


class Outputs(Weighted):
    """All samples weigh the same."""

    def samples(self, lesson: Lesson) -> float:
        return float(lesson.fewest)

    def wrong(self, lesson: Lesson, residual: Tensor, rows: int) -> Tensor:
        return residual.reshape(rows, -1)

    def weight(self, lesson: Lesson, site: Site) -> float:
        return 1 / lesson.rows[site.name]


class FromLoss(Weighted):
    """Of the outputs' tangents only their product with the error is known: the derivative of the loss."""

    def wrong(self, lesson: Lesson, residual: Tensor, rows: int) -> Tensor:
        e = lesson.error.flat
        return ((residual * e).sum(1, keepdim=True) * e).reshape(rows, -1)


RULES = {"weighted": WEIGHTED, "outputs": Outputs(), "loss": FromLoss(), "momentum": Momentum()}


@dataclass(frozen=True)
class StudiedFeedback(gg.Feedback):
    """`gg.Feedback` with another teacher, or another start, as a study asks."""

    learn: str = "weighted"
    first: str = "zero"
    seed: int = 0

    @property
    def rule(self) -> LearningRule:  # type: ignore[override]
        return RULES.get(self.learn, WEIGHTED)

    def start(self, site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
        if self.first == "random":
            return random_start(self.seed, site, shape, like)
        return super().start(site, shape, like)

    def draws(self, count: int) -> Draws | None:
        return None if self.learn in ("truth", "never") else super().draws(count)

    def run(self, step: Step) -> tuple[gg.Estimate, State]:
        return super().run(self._told(step) if self.learn == "truth" else step)

    def _told(self, step: Step) -> Step:
        """The step with matrices that are drawn to the true gradients by regression."""
        found, _ = gg.Backprop().run(replace(step, detail=True))
        predictor = Predictor(step.state.learned, step.pool, self.start)
        gates: dict[str, Tensor | None] = {}
        outputs = step.passes.plain(lambda site, x, s: gates.update({site.name: site.gate_at(s)}))
        error = OutputError(step.task, outputs)
        for site in step.layout.guessed:
            predictor.regress(site, gates[site.name], error, site.flat(found.site_grads[site.name]), self.rate)
        return replace(step, state=replace(step.state, learned=predictor.entries))


def studied_feedback(
    guess: gg.Guess, *, learn: str = "weighted", start: str = "zero", seed: int = 0, **options: Any
) -> gg.Feedback:
    """Feedback around `guess` that learns as a study asks; `options` are the other arguments of `gg.Feedback`."""
    if learn == "weighted" and start == "zero":
        return gg.Feedback(guess, **options)
    return StudiedFeedback(guess, **options, learn=learn, first=start, seed=seed)
