"""`advise`: a few steps of every method that may suit a model, on this machine."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.advise.advice import Advice, recommend
from gradguess.advise.candidates import candidates_for
from gradguess.advise.trial import Trial
from gradguess.backends import RandomState
from gradguess.backends.tracing import reason_of
from gradguess.errors import InputError, check_count
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Layout, Sites
from gradguess.model.task import LossFn, Task, check_plain, check_trainable, opened
from gradguess.step.processes import pool_of

SURE = 3  # candidates that are measured however long it takes: the exact ones, and the first after them
PREPARING = 0.7  # part of the time in which further candidates may start
LEAST, ROUNDS = 3, 20  # at least so many, and at most


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
    _check(model, seconds, pieces, memory_mb, seed)
    before = RandomState.everywhere()
    try:
        with opened(model, loss_fn, inputs, targets, finite=True) as task, torch.enable_grad():
            task = _copied(task)
            trials, lowest = _trials(task, sites, pieces, seed)
            _measure(trials, lowest, begin, seconds)
    finally:
        before.restore()
    rows = tuple(trial.compared(trials[0], trials[1]) for trial in trials)
    chosen, why = recommend(rows, memory_mb)
    name, code = (chosen.method, chosen.code) if chosen else (None, "")
    return Advice(rows, name, why, code, time.perf_counter() - begin)


def _check(model: nn.Module, seconds: float, pieces: int, memory_mb: float | None, seed: int) -> None:
    for name, value in (("seconds", seconds), ("memory_mb", 1 if memory_mb is None else memory_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{name}: expected a positive number, found {value!r}.")
    check_count("pieces", pieces, least=2)
    check_count("seed", seed, least=0)
    if pool_of(None, model).size > 1:
        raise InputError("advise measures one process: call it before torch.distributed is initialised.")


def _copied(task: Task) -> Task:
    """The same task on copies of all that a step could change."""
    try:
        model, loss_fn = copy.deepcopy((task.model, task.loss_fn))  # at once: the loss may be a method of the model
    except Exception as error:
        raise InputError(f"The model or the loss cannot be copied by copy.deepcopy: {reason_of(error)}.") from error
    own = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
    return Task(model, loss_fn, *tree_map_only(Tensor, own, (task.inputs, task.targets)))


def _trials(task: Task, sites: Sites, pieces: int, seed: int) -> tuple[list[Trial], tuple[str, ...]]:
    """One for each candidate, and the parameters of the lowest site."""

    def found(where: Sites) -> Layout | None:
        try:
            return lay_out(task, where)
        except Exception:  # the candidates that need it meet the same error, and say so
            return None

    count = next((n for n in range(pieces, 2, -1) if found(n) is not None), 2)
    layout = found(sites) if sites == "auto" else lay_out(task, sites)  # what the caller named must be there
    owned = [site.parameters for site in layout.sites if site.parameters] if layout else []
    trials = [Trial(candidate, task, sites, count, seed) for candidate in candidates_for(task.model)]
    return trials, owned[0] if owned else tuple(trials[0].parameters)[:1]


def _measure(trials: list[Trial], lowest: tuple[str, ...], begin: float, seconds: float) -> None:
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
