"""The method: one step of learned feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from gradguess.errors import InputError, check_choice, check_count
from gradguess.guesses.base import Guess
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback.forms import FORMS
from gradguess.methods.feedback.forward import Forward, keep_pass
from gradguess.methods.feedback.lesson import Lesson
from gradguess.methods.feedback.predictor import Predictor, Start, zeros
from gradguess.methods.feedback.replay import Replay
from gradguess.methods.feedback.rules import WEIGHTED, Rule
from gradguess.methods.feedback.scattered import Scattered
from gradguess.methods.output_error import OutputError
from gradguess.step.base import State, Step
from gradguess.step.measure import Measurement, measure
from gradguess.step.split import first_rows


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
    rule: ClassVar[Rule] = WEIGHTED  # how a lesson changes the matrices

    def __post_init__(self) -> None:
        if not isinstance(self.guess, Guess):
            raise InputError(
                "Feedback(guess): expected a guess that draws directions at sites, gg.WPerp() for instance, "
                f"found {self.guess!r}."
            )
        check_choice("Feedback(form)", self.form, tuple(FORMS))
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

    def run(self, step: Step) -> tuple[Estimate, State]:
        for site in step.layout.sites:
            if site.severed:
                raise InputError(
                    f"Feedback needs the derivative above {site.name!r}, and an operation between that site and the "
                    "next ones, or the loss, has none in PyTorch. Use a guess alone, gg.WPerp() for instance: it "
                    "draws N(0, I) there."
                )
        predictor = Predictor(step.state.learned, step.pool, self.start())
        teaches = self.draws(step.state.count) is not None
        if step.options.memory == "replay" and not step.detail:
            result = Replay(self, step, predictor, teaches).run()
        else:
            result = self._run_stored(step, predictor, teaches)
        return result, replace(step.state, learned=predictor.entries)

    def _run_stored(self, step: Step, predictor: Predictor, teaches: bool) -> Estimate:
        form, whole = FORMS[self.form], self.fraction == 1
        seen = self.measure(step) if teaches and whole else None
        forward = keep_pass(step, seen, form.chained)
        error = OutputError(step.task, forward.outputs)
        self.before_lesson(step, forward, predictor, error)
        lesson = None if seen is None else self._lesson(step, seen, error, predictor)
        if teaches and not whole:
            self._teach_part(self.part_of(step), predictor)
        h = {}
        for site in step.layout.guessed:
            gate, y = forward.gate(site), None if seen is None else seen.records[site.name].y
            if form.reads(site, step.layout):
                h[site.name] = form.at_site(predictor, site, gate, forward.size(site), error, lesson, y)
            elif lesson is not None and y is not None:
                lesson.learn(site, y, gate)
        g = form.combine(self, forward, predictor, h, error)
        losses = error.losses if seen is None else seen.losses
        jvp = losses.new_zeros(0, len(losses)) if seen is None else seen.jvp
        result = Estimate(losses.mean(), forward.to_parameters(g, len(losses)), jvp, losses=losses)
        if step.detail:
            result.site_grads = {site.name: forward.shaped(site, g) for site in step.layout.sites}
            result.directions = {} if seen is None else _directions(seen)
        return result

    def start(self) -> Start:
        """How the matrices begin: at zero."""
        return zeros

    def before_lesson(self, step: Step, forward: Forward, predictor: Predictor, error: OutputError) -> None:
        """Does nothing. A study may change the predictor here."""

    def measure(self, step: Step) -> Measurement:
        """Balanced directions at every site whose gradient is predicted."""
        return measure(Scattered(step, self.guess), lambda site: site.guessed, balance=True, keep_outputs=True)

    def part_of(self, step: Step) -> Step:
        """The same step on the samples that carry tangents; it leaves random state and buffers as they are."""
        task = first_rows(step.task, self.fraction)
        return replace(step, task=task, passes=step.passes.aside(task), detail=False)

    def new_lesson(self, step: Step, predictor: Predictor) -> Lesson:
        return Lesson(predictor, self.rule, self.rate, step.options.tangents)

    def _lesson(self, step: Step, seen: Measurement, error: OutputError, predictor: Predictor) -> Lesson:
        """What a measurement shows of the predictor."""
        lesson, directions = self.new_lesson(step, predictor), _directions(seen)
        for p, (tangent, chosen) in enumerate(seen.passes):
            for name in directions if chosen is None else [chosen]:
                gate, scale = seen.records[name].gate, seen.scales[name][tangent]
                lesson.observe(p, step.layout[name], directions[name][tangent], gate, scale)
        lesson.conclude(seen, error)
        return lesson

    def _teach_part(self, step: Step, predictor: Predictor) -> None:
        seen = self.measure(step)
        lesson = self._lesson(step, seen, OutputError(step.task, seen.outputs), predictor)
        for name, y in _directions(seen).items():
            lesson.learn(step.layout[name], y, seen.records[name].gate)


def _directions(seen: Measurement) -> dict[str, Tensor]:
    return {name: record.y for name, record in seen.records.items() if record.y is not None}
