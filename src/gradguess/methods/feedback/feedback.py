"""The method: one step of learned feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradguess.errors import InputError, check_choice, check_count
from gradguess.guesses.base import Guess
from gradguess.guesses.factored import dense
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback.lesson import WEIGHTED, LearningRule, Lesson, Predictor, Scattered
from gradguess.model.hooks import Visit
from gradguess.model.site import Site
from gradguess.model.task import with_tensors
from gradguess.step.base import State, Step
from gradguess.step.parts import first_rows
from gradguess.step.pull_back import OutputError, Piece, Pieces


@dataclass(frozen=True)
class Feedback(Method):
    """Learned feedback around any guess.

    Args:
        guess: draws the directions that teach, `gg.WPerp()` for instance.
        form: how predictions become the estimate. "direct" uses the prediction itself, "chained" applies the chain
            rule to the predictions of the sites above, "corrected" adds what the tangents say against the prediction.
        rate: step size of the predictor, at least 0 and below 2. From 2 on it diverges, whatever the guess.
        every: draw tangents every so many steps. The other steps run a plain forward pass.
        fraction: the part of the batch that carries tangents, above 0 and at most 1.
        sweeps: how often "chained" applies the chain rule to the predictions. Each sweep is a step towards
            backpropagation; with as many sweeps as there are sites in a row it *is* backpropagation. The other forms
            do not use it.
        bootstrap: the rate, from 0 to 1, at which "chained" also draws the predictor to the chained estimate itself.
            The other forms do not use it.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=3), form="direct"))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["B"].shape
    torch.Size([8, 3])
    """

    guess: Guess
    form: Literal["direct", "chained", "corrected"] = "chained"
    rate: float = 0.3
    every: int = 1
    fraction: float = 1.0
    sweeps: int = 1
    bootstrap: float = 0.0

    apart = True
    rule: ClassVar[LearningRule] = WEIGHTED  # how a lesson changes the matrices

    def __post_init__(self) -> None:
        if not isinstance(self.guess, Guess):
            raise InputError(
                "Feedback(guess): expected a guess that draws directions at sites, gg.WPerp() for instance, "
                f"found {self.guess!r}."
            )
        check_choice("Feedback(form)", self.form, ("direct", "chained", "corrected"))
        if not 0 <= self.bootstrap <= 1:
            raise InputError(f"Feedback(bootstrap): expected 0 <= bootstrap <= 1, found {self.bootstrap!r}.")
        if not 0 <= self.rate < 2:
            raise InputError(f"Feedback(rate): expected 0 <= rate < 2 (from 2 on it diverges), found {self.rate!r}.")
        if not 0 < self.fraction <= 1:
            raise InputError(f"Feedback(fraction): expected 0 < fraction <= 1, found {self.fraction!r}.")
        check_count("Feedback(every)", self.every)
        check_count("Feedback(sweeps)", self.sweeps)

    def draws(self, count: int) -> Draws | None:
        """The guess counts the steps in which it teaches."""
        return None if count % self.every else Draws(self.guess, count // self.every, self.fraction)

    def start(self, site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The first matrix of a site, on the device and in the dtype of `like`: zero."""
        return like.new_zeros(shape)

    def run(self, step: Step) -> tuple[Estimate, State]:
        for site in step.layout.sites:
            if site.severed:
                raise InputError(
                    f"Feedback needs the derivative above {site.name!r}, and an operation between that site and the "
                    "next ones, or the loss, has none in PyTorch. Use a guess alone, gg.WPerp() for instance: it "
                    "draws N(0, I) there."
                )
        learning = _Step(self, step)
        return learning.estimate(), replace(step.state, learned=learning.predictor.entries)


class _Step:
    """One step: the lesson of a tangent pass, then the gradient, from predictions that have learned.

    The tangent pass, or a plain one where no tangent is carried, records the pieces between the sites, which are
    differentiated one by one when the error is known. With `memory="replay"` another pass is run for that.
    """

    def __init__(self, method: Feedback, step: Step) -> None:
        self.method, self.step, self.layout = method, step, step.layout
        self.sweeps = method.sweeps if method.form == "chained" else 0
        if self.sweeps and not (step.keeps or step.layout.in_a_line):
            raise InputError(
                "Feedback(form='chained') with memory='replay' needs sites that follow one another in a line, and this "
                "model has sites that reach several others: it would have to keep every layer. Cut the model into "
                "pieces (sites=4 for instance), or use memory='store' or form='direct'."
            )
        self.predictor = Predictor(step.state.learned, step.pool, method.start)
        self.lesson: Lesson | None = None  # of the whole batch

    def estimate(self) -> Estimate:
        method, step, tail = self.method, self.step, None
        options: Any = {"lag": self.sweeps, "finished": self._draw_to, "waits": step.keeps}
        walk = Pieces(step, self.layout.guessed, self._signal, **options)
        teaches = method.draws(step.state.count) is not None
        if teaches and method.fraction == 1:
            self.lesson = self._lesson(step, walk.visit if step.keeps and step.passes.records_graphs else None)
        seen = None if self.lesson is None else self.lesson.seen
        if seen is not None:
            outputs, tail = seen.outputs, seen.tail
        elif step.keeps:
            outputs, tail = step.passes.graph(walk.visit)
        else:
            outputs = step.passes.plain(lambda site, x, s: None)
        self.error = OutputError(step.task, outputs)
        losses = self.error.losses if seen is None else seen.losses
        jvp = losses.new_zeros(0, len(losses)) if seen is None else seen.jvp
        if self.lesson is not None:
            self.lesson.conclude(self.error)
        elif teaches:
            self._teach_part()
        step.begin(losses, jvp)
        if tail is None:
            if not step.keeps and seen is not None:
                step.noise.rewind()
            tail = step.passes.graph(walk.visit)[1]
        walk.settle(tail)
        result = Estimate(losses.mean(), walk.gradients.by_name, jvp, site_grads=walk.site_grads, losses=losses)
        if step.detail and seen is not None:
            result.directions = {name: dense(one.y) for name, one in seen.records.items() if one.y is not None}
        return result

    def _lesson(self, step: Step, cut: Visit | None = None) -> Lesson:
        return Lesson(self.predictor, self.method.rule, self.method.rate, Scattered(step, self.method.guess), cut)

    def _teach_part(self) -> None:
        """A lesson of the samples that carry tangents; it leaves random state and buffers as they are."""
        task = first_rows(self.step.task, self.method.fraction)
        part = replace(self.step, task=task, passes=self.step.passes.aside(task), detail=False)
        own = self.layout.members.buffers() if self.layout.mutates else {}  # a graph may have saved them
        with with_tensors(task.model, {name: buffer.clone() for name, buffer in own.items()}):
            lesson = self._lesson(part)
            lesson.conclude(OutputError(task, lesson.seen.outputs))

            def learn(site: Site, x: Any, s: Tensor) -> None:
                if site.guessed:
                    gate = site.gate_at(s)
                    lesson.learn(site, lesson.directions(site, s, gate), gate)

            for site in self.layout.guessed if part.keeps else ():
                seen = lesson.seen.records[site.name]
                assert seen.y is not None
                lesson.learn(site, dense(seen.y), seen.gate)
            if not part.keeps:
                part.noise.rewind()
                part.passes.plain(learn)

    @torch.no_grad()
    def _signal(self, piece: Piece) -> Tensor:
        """`h` at a site, which learns first. A correction is to what was predicted before."""
        site, s, lesson = piece.site, piece.leaf.detach(), self.lesson
        piece.gate = gate = site.gate_at(s)
        predict = partial(self.predictor.predict, site, gate, site.flat(s).shape[1], self.error)
        if lesson is None:
            h = predict()
        else:
            y = lesson.directions(site, s, gate)
            before = predict() + lesson.correction(site, y) if self.method.form == "corrected" else None
            lesson.learn(site, y, gate)
            h = predict() if before is None else before
        return h if site.batch_dim == 0 and s.dim() == 2 else site.unflat(h, s)

    @torch.no_grad()
    def _draw_to(self, piece: Piece, g: Tensor) -> None:
        """Draws the matrix of a site to the chained estimate there, with `bootstrap`."""
        if self.sweeps and self.method.bootstrap and piece.site.guessed:
            self.predictor.regress(piece.site, piece.gate, self.error, piece.site.flat(g), self.method.bootstrap)
