"""`advise`: a few steps of every method that may suit a model, on this machine."""

from __future__ import annotations

import copy
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.advise.advice import Advice, Candidate, Row, candidates_for, recommend
from gradguess.backends.meter import peak_bytes
from gradguess.backends.meter import seconds as seconds_of
from gradguess.backends.random import RandomState, seed_global
from gradguess.diagnose.report import cosine
from gradguess.errors import GradguessError, InputError, NonFiniteError, check_count, reason_of
from gradguess.estimate import ForwardGradient
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Layout, Sites
from gradguess.model.task import LossFn, Task, check_plain, check_trainable, opened
from gradguess.step.parts import pool_of

SURE = 3  # candidates that are measured however long it takes: the exact ones, and the first after them
PREPARING = 0.7  # part of the time in which further candidates may start
LEAST, ROUNDS = 3, 20  # at least so many, and at most
STEPS, LESSONS = 4, 6  # steps until the gradient is compared: of a method that learns nothing, of one that does
SHORTEST = 0.02  # seconds of a round
LONGEST = 160  # characters of a reason
Gradients = dict[str, Tensor]  # by the parameter's name


def advise(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    *,
    seconds: float = 30.0,
    sites: Sites = "auto",
    pieces: int = 4,
    memory_mb: float | None = None,
    seed: int = 0,
) -> Advice:
    """Run a few steps of every method that may suit this model, and say which one to use.

    The steps are made on copies: model, buffers, `.grad`, batch and random state stay as they are; hooks of the model
    run. The weights of the copy stay as they are as well, and all steps are on this batch. What a method learns has
    learned for six steps when its gradient is compared. That says how good a signal is at the start, and little of the
    accuracy at the end.

    Args:
        model: any module, on the device on which it will be trained.
        loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
        inputs: of the model, one batch of the size that will be used.
        targets: of the loss.
        seconds: about how long it may take. Backpropagation with and without checkpoints and one method more are
            always measured; what finds no time after them says so.
        sites: where guesses and feedback have their sites, as in `estimate`.
        pieces: into how many pieces the model is cut for students and checkpoints; fewer where it has fewer cuts.
        memory_mb: what a step may take: recommend what fits. `Row.memory_mb` says what is counted.
        seed: of the guesses.

    Returns:
        an `Advice`. Print it for a table: `time` and `memory` are multiples of those of `loss.backward()`.

    Times are of eager steps without an optimiser: medians of ratios over interleaved rounds. Memory is that of tensors:
    what PyTorch's allocator counts on a CUDA device (its peak starts anew), what operators return on a CPU.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> advice = gg.advise(model, torch.nn.CrossEntropyLoss(reduction="none"), x, t, seconds=0.1)
    >>> advice.method, advice.code
    ('Backpropagation', 'loss_fn(model(inputs), targets).mean().backward()')
    """
    begin = time.perf_counter()
    check_trainable(model)
    check_plain(model)
    for name, value in (("seconds", seconds), ("memory_mb", 1 if memory_mb is None else memory_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{name}: expected a positive number, found {value!r}.")
    check_count("pieces", pieces, least=2)
    check_count("seed", seed, least=0)
    if pool_of(None, model).size > 1:
        raise InputError("advise measures one process: call it before torch.distributed is initialised.")
    before = RandomState.everywhere()
    try:
        with opened(model, loss_fn, inputs, targets, finite=True) as task, torch.enable_grad():
            task = _copied(task)
            pieces, lowest = _places(task, sites, pieces)
            trials = [Trial(candidate, task, sites, pieces, seed) for candidate in candidates_for(task.model)]
            _measure(trials, lowest, begin, seconds)
    finally:
        before.restore()
    rows = tuple(trial.compared(trials[0], trials[1]) for trial in trials)
    chosen, why = recommend(rows, memory_mb)
    method, code = (chosen.method, chosen.code) if chosen else (None, "")
    return Advice(rows, method, why, code, time.perf_counter() - begin)


def _copied(task: Task) -> Task:
    """The same task on copies of all that a step could change."""
    try:
        model, loss_fn = copy.deepcopy((task.model, task.loss_fn))  # at once: the loss may be a method of the model
    except Exception as error:
        raise InputError(f"The model or the loss cannot be copied by copy.deepcopy: {reason_of(error)}.") from error
    own = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
    return Task(model, loss_fn, *tree_map_only(Tensor, own, (task.inputs, task.targets)))


def _places(task: Task, sites: Sites, pieces: int) -> tuple[int, tuple[str, ...]]:
    """Into how many pieces the model can be cut, `pieces` at most, and the parameters of the lowest site."""

    def found(where: Sites) -> Layout | None:
        try:
            return lay_out(task, where)
        except Exception:  # the candidates that need it meet the same error, and say so
            return None

    layout = found(sites) if sites == "auto" else lay_out(task, sites)  # what the caller named must be there
    owned = [site.parameters for site in layout.sites if site.parameters] if layout else []
    first = [name for name, p in task.model.named_parameters() if p.requires_grad][:1]
    return next((n for n in range(pieces, 2, -1) if found(n)), 2), owned[0] if owned else tuple(first)


def _measure(trials: list[Trial], lowest: tuple[str, ...], begin: float, seconds: float) -> None:
    """Prepare what finds time, then time all that works in turns; about so many seconds from `begin`."""
    spent = lambda: time.perf_counter() - begin  # noqa: E731
    first, true = trials[0], None
    try:
        first.step()
        true = first.gradients()
        first.prepare(true, lowest)
    except torch.OutOfMemoryError:  # other errors are of the model, the loss or the batch: the caller must see them
        first.fail("out of memory")
    for number, trial in enumerate(trials[1:], 1):
        if number >= SURE and spent() > PREPARING * seconds:
            trial.fail(f"not measured: the {seconds:g} s were spent; pass a larger seconds=, or a smaller batch")
        else:
            trial.attempt(partial(trial.prepare, true, lowest))
    for done in range(ROUNDS):
        if done >= LEAST and spent() > seconds:
            break
        for trial in trials:
            if trial.row.works:
                trial.attempt(trial.round)


class Trial:
    """A candidate at work on the copy of the model, and its row of the table, where an error becomes the `problem`."""

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
        """Runs `prepare` or `round`; an error is the reason why this candidate does not work."""
        try:
            run()
        except Exception as error:
            self.fail(reason(error))
        finally:
            self._clear()

    def fail(self, problem: str) -> None:
        self.row = Row(self.row.method, self.row.code, problem)

    def prepare(self, true: Gradients | None, lowest: tuple[str, ...]) -> None:
        """The first steps: they set up libraries, measure memory and let the method learn.

        Args:
            true: the gradients of backpropagation, with which those of the last step are compared; None: unknown.
            lowest: the parameters of the lowest site.
        """
        kept, steps, candidate = 0, STEPS, self.candidate
        if candidate.method is not None:
            options: dict[str, Any] = {"sites": self.sites, "top": candidate.top, "seed": self.seed}
            self.forward = ForwardGradient(self.task.model, candidate.method, **options)
            self.forward.mixes = True  # no candidate warns of it: the cosines show what comes of it
        self.step()
        if self.forward is not None:
            entries = [*self.forward.kept.values(), *self.forward.learned.values()]
            kept = sum(value.nbytes for values in entries for value in values.values())
            steps = LESSONS if self.forward.learned else STEPS
        self._rewind(search=True)
        peak = peak_bytes(self.step, self.device)
        self._rewind(search=True)
        self.search = seconds_of(self.step, self.device)
        self._rewind()
        spent = min(seconds_of(self.step, self.device) for _ in range(3, steps))
        self.length = max(1, ceil(SHORTEST / (spent * candidate.every)))
        if candidate.refresh > 1:
            self.length = min(self.length, candidate.refresh - 1)  # no search in a round: `_ratio` adds it
        memory, found = None if peak is None else (peak + kept) / 2**20, self.gradients()
        self.row = replace(self.row, memory_mb=memory)
        if true is not None:
            low = cosine_of(found, {name: true[name] for name in lowest if name in true})
            self.row = replace(self.row, cosine=cosine_of(found, true), lowest_cosine=low)

    def gradients(self) -> Gradients:
        """The gradients of the last step."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def round(self) -> None:
        """Times some steps."""
        self._rewind()
        count = self.length * self.candidate.every
        self.rounds.append(seconds_of(lambda: self.step(count), self.device) / count)

    def step(self, count: int = 1) -> None:
        """Computes gradients, `count` times."""
        for _ in range(count):
            self._clear()
            seed_global(self.seed)  # the same dropout masks for all
            if self.forward is None:
                self._differentiate()
            else:
                self.forward(self.task.loss_fn, self.task.inputs, self.task.targets)

    def _differentiate(self) -> None:
        loss = self.task.run(grad=True)[1].mean()
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
        """Makes the next step one that searches, or the first of a round that does not."""
        if self.forward is not None:
            self.forward.state = replace(self.forward.state, count=0 if search else self.candidate.every)

    def _clear(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def cosine_of(found: Gradients, true: Gradients) -> float:
    """The cosine of two gradients, over all parameters that have a true one."""
    dense = lambda grad: grad.to_dense().double()  # noqa: E731
    return cosine((dense(found.get(name, torch.zeros_like(grad))), dense(grad)) for name, grad in true.items())


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    kind = "" if isinstance(error, GradguessError) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{kind}{error}" or type(error).__name__, LONGEST, placeholder=" …")
