"""One candidate at work on the copy of the model: its steps, their time, memory and gradient."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from gradguess.advise.advice import Row
from gradguess.advise.candidates import Candidate
from gradguess.backends import peak_bytes, seconds, seed_global
from gradguess.errors import GradguessError, InputError, NonFiniteError
from gradguess.estimate import ForwardGradient
from gradguess.model.cut_pass import watched_run
from gradguess.model.site import Sites
from gradguess.model.task import Task

STEPS, LESSONS = 4, 6  # steps until the gradient is compared: of a method that learns nothing, of one that does
SHORTEST = 0.02  # seconds of a round
LONGEST = 160  # characters of a reason
Gradients = dict[str, Tensor]  # by the parameter's name


class Trial:
    """A candidate, and its row of the table. An error becomes the row's `problem`."""

    def __init__(self, candidate: Candidate, task: Task, sites: Sites, pieces: int, seed: int) -> None:
        self.candidate, self.task, self.seed = candidate, task, seed
        self.sites: Sites = pieces if candidate.in_pieces else sites
        self.row = Row(candidate.name, candidate.line(sites, pieces, task.inputs))
        self.parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self.forward: ForwardGradient | None = None
        self.rounds: list[float] = []  # seconds of a step, by round
        self.search = 0.0  # seconds of a step that searches
        self.length = 1  # rounds of `every` steps that are timed together: a step after one of another method is slower

    def attempt(self, run: Callable[[], None]) -> None:
        """Do `prepare` or `round`; an error is the reason why this candidate does not work."""
        try:
            run()
        except Exception as error:
            self.fail(reason(error))
        finally:
            self._clear()

    def fail(self, problem: str) -> None:
        self.row = Row(self.row.method, self.row.code, problem)

    def prepare(self, true: Gradients | None, lowest: tuple[str, ...]) -> None:
        """The first steps: they set up libraries, measure memory and let the method learn. The last is compared.

        Args:
            true: the gradients of backpropagation; None where they are not known.
            lowest: the parameters of the lowest site.
        """
        kept, steps = 0, STEPS
        if self.candidate.method is not None:
            model, method, top = self.task.model, self.candidate.method, self.candidate.top
            self.forward = ForwardGradient(model, method, sites=self.sites, top=top, seed=self.seed)
            self.forward.mixes = True  # no candidate warns of it: the cosines show what comes of it
        self.step()
        if self.forward is not None:
            entries = [*self.forward.kept.values(), *self.forward.learned.values()]
            kept = sum(value.nbytes for values in entries for value in values.values())
            steps = LESSONS if self.forward.learned else STEPS
        self._rewind(search=True)
        peak = peak_bytes(self.step, self.device)
        self._rewind(search=True)
        self.search = seconds(self.step, self.device)
        self._rewind()
        spent = [seconds(self.step, self.device) for _ in range(3, steps)]
        self.length = max(1, ceil(SHORTEST / (min(spent) * self.candidate.every)))
        if self.candidate.refresh > 1:
            self.length = min(self.length, self.candidate.refresh - 1)  # no search in a round: `_ratio` adds it
        found = self.gradients()
        self.row = replace(
            self.row,
            memory_mb=None if peak is None else (peak + kept) / 2**20,
            cosine=None if true is None else cosine(found, true),
            lowest_cosine=None if true is None else cosine(found, {n: g for n, g in true.items() if n in lowest}),
        )

    def gradients(self) -> Gradients:
        """The gradients of the last step."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def round(self) -> None:
        """Time some steps."""
        self._rewind()
        count = self.length * self.candidate.every
        self.rounds.append(seconds(lambda: self.step(count), self.device) / count)

    def step(self, count: int = 1) -> None:
        """Compute gradients, so many times."""
        for _ in range(count):
            self._clear()
            seed_global(self.seed)  # the same dropout masks for all
            if self.forward is None:
                self._differentiate()
            else:
                self.forward(self.task.loss_fn, self.task.inputs, self.task.targets)

    def _differentiate(self) -> None:
        loss = watched_run(self.task, grad=True)[1].mean()
        if not loss.requires_grad:
            raise InputError(
                "The loss has no derivative with respect to any parameter, so there is no gradient to compare with. "
                "Is something detached, or under torch.no_grad()? Operations without a derivative need "
                "gg.ForwardGradient(..., derivative='finite'), which advise does not try."
            )
        if not torch.isfinite(loss):
            raise NonFiniteError("The loss of this batch is NaN or infinite before any step. Check the data.")
        loss.backward(inputs=list(self.parameters.values()))  # and nothing else that the loss may depend on

    def compared(self, backprop: Trial, checkpoints: Trial) -> Row:
        """The row with time and memory over those of backpropagation."""
        mine, theirs = self.row.memory_mb, backprop.row.memory_mb
        memory = mine / theirs if mine is not None and theirs else None
        return replace(self.row, time=self._ratio(backprop), over_checkpoints=self._ratio(checkpoints), memory=memory)

    def _ratio(self, base: Trial) -> float | None:
        """The median over rounds of this time over that of `base` in the same round; searches are spread."""
        if not (self.row.works and base.row.works and self.rounds):
            return None
        found = statistics.median(mine / theirs for mine, theirs in zip(self.rounds, base.rounds, strict=True))
        if not self.candidate.refresh:
            return found
        extra = max(0.0, self.search - statistics.median(self.rounds))
        return found + extra / (self.candidate.refresh * self.candidate.every) / statistics.median(base.rounds)

    def _rewind(self, *, search: bool = False) -> None:
        """Make the next step one that searches, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.state = replace(self.forward.state, count=0 if search else self.candidate.every)

    def _clear(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def cosine(found: Gradients, true: Gradients) -> float:
    """The cosine of two gradients, over all parameters that have a true one; 0 if either is zero."""
    inner = square = true_square = 0.0
    for name, grad in true.items():
        b = grad.to_dense().double()
        a = found[name].to_dense().double() if name in found else torch.zeros_like(b)
        inner, square = inner + float((a * b).sum()), square + float(a.square().sum())
        true_square += float(b.square().sum())
    return inner / (square * true_square) ** 0.5 if square * true_square > 0 else 0.0


def reason(error: Exception) -> str:
    """An error in one line: its first sentences."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, GradguessError):
        words = f"{type(error).__name__}: {words}"
    if len(words) <= LONGEST:
        return words
    whole, end, _ = words[:LONGEST].rpartition(". ")  # sentences
    return f"{whole}." if end else words[: LONGEST - 1] + "…"
