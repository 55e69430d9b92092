"""`estimate`, which computes and writes nothing, and `ForwardGradient`, which writes `.grad` and keeps state.

Both read: find the sites, draw directions, carry them to the losses, pull the estimates back to the parameters
(`Method.run`; the passes are in `gradguess.step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradguess.errors import InputError, NonFiniteError
from gradguess.guesses import Estimate, Method
from gradguess.guesses._base import check_count
from gradguess.isolation import Snapshot, untouched
from gradguess.layout import bare_layout, lay_out
from gradguess.noise import Noise
from gradguess.parts import Part, Pool, add_up, first_samples, gate_moments, pool_of, split
from gradguess.scratch import Scratch
from gradguess.sites import Layout, LayoutChanged, Sites
from gradguess.step import PROBE_ROWS, Cache, Options, Step
from gradguess.task import LossFn, Task, check_model


def estimate(
    model: nn.Module,
    guess: Method,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    tangents: int = 1,
    sites: Sites = "auto",
    generator: torch.Generator | None = None,
    *,
    isolate: bool = False,
    coupling: Literal["sample", "batch"] = "sample",
    balance: bool = False,
) -> Estimate:
    """Estimate the gradient of the mean loss of one batch. Writes nothing, holds no state.

    Args:
        model: any module; a tuple of inputs is passed as arguments, a dict as keyword arguments.
        guess: how directions are drawn, `gg.WPerp()` for instance.
        loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
        tangents: directions per step; the estimate is their average.
        sites: "auto", "leaf" (every layer), "branch" (what feeds an addition), a list of module names, or a number:
            the model in so many pieces.
        generator: source of the directions; without one, a new one with a fresh seed.
        isolate: one tangent per site, so that sites cause each other no noise. `jvp` then has one row per tangent
            and site, tangent by tangent.
        coupling: "batch" where a layer mixes the samples (batch norm in training mode): every sample's estimate then
            uses the directional derivative of the whole batch. See the docs, "Batch norm".

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WPerp(k=3), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> sorted(est.grads), est.jvp.shape, est.site_grads["2"].shape
    (['0.bias', '0.weight', '2.bias', '2.weight'], torch.Size([1, 5]), torch.Size([5, 3]))
    """
    _check_guess(guess)
    task = Task(model, loss_fn, inputs, targets)
    options = Options(tangents=tangents, isolate=isolate, coupling=coupling, balance=balance)
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    layout = _layout(guess, task, sites)
    noise = Noise(generator)
    with untouched(model) if layout.stochastic or layout.mutates else nullcontext():
        result, _ = _settle(guess, task, sites, layout, noise, lambda layout: Step(task, layout, noise, options))
    _check_finite(result, "this batch")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result.grads = {name: result.grads.get(name, torch.zeros_like(p)) for name, p in parameters.items()}
    return result


class ForwardGradient:
    """Adds estimated gradients to `.grad`, as `loss.backward()` would; any optimiser can follow.

    Owns what lives from step to step: the random generator, cached bases and learned feedback.

    Args:
        model, guess, tangents, sites, isolate, coupling: as in `estimate`.
        memory: "store" keeps each layer's input and direction until the derivative is known; "replay" runs the pass
            a second time instead, so that activation memory does not grow with depth.
        seed: of the generator, which lives on the device of the first parameter.
        nonfinite: what a NaN or infinite loss or derivative does: "raise" an error that names the step, "skip" the
            step (nothing is added to `.grad`; `skipped` counts), or "ignore" (no check, and no wait for a GPU).
        chunk: run the batch in pieces of at most so many samples; bounds memory in the batch, not the estimate, which
            is that of the whole batch up to rounding. Dropout and batch norm see each piece as a batch, `Feedback`
            as a lesson, `balance` takes its scales from each, and W⊥-NS its singular values from the first.
        group: the processes (of torch.distributed) that share each batch; by default all of them, where it is
            initialised. Each passes its own samples; `.grad` is that of all, the same everywhere, and for a given
            seed does not depend on their number. The loss that is returned is of a process's own samples. The
            model starts as rank 0's.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.WPerp(k=3))
    >>> optimiser = torch.optim.AdamW(model.parameters())
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> optimiser.step()
    """

    def __init__(
        self,
        model: nn.Module,
        guess: Method,
        tangents: int = 1,
        memory: Literal["store", "replay"] = "store",
        sites: Sites = "auto",
        seed: int = 0,
        *,
        isolate: bool = False,
        coupling: Literal["sample", "batch"] = "sample",
        balance: bool = False,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        chunk: int | None = None,
        group: Any = None,
    ) -> None:
        _check_guess(guess)
        if nonfinite not in ("raise", "skip", "ignore"):
            raise InputError(f"nonfinite: expected 'raise', 'skip' or 'ignore', found {nonfinite!r}.")
        check_model(model)
        if next(model.parameters(), None) is None:
            raise InputError("The model has no parameters: there is nothing to train.")
        self.model, self.guess, self.sites = model, guess, sites
        self.options = Options(tangents=tangents, isolate=isolate, memory=memory, coupling=coupling, balance=balance)
        self.nonfinite = nonfinite
        self.generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        self.cache: Cache = {}
        self.learned: Cache = {}
        self.scratch = Scratch()
        self.steps = 0
        self.skipped = 0
        self.layout: Layout | None = None
        if chunk is not None:
            check_count("chunk", chunk)
            if coupling == "batch":
                raise InputError("chunk: samples that mix (coupling='batch') cannot be run in pieces.")
        self.chunk = chunk
        self.pool = pool_of(group, model)
        self.pool.agree([t.data for t in (*model.parameters(), *model.buffers())])

    def __call__(self, loss_fn: LossFn, inputs: Any, targets: Any, *, place: tuple[int, int] | None = None) -> Tensor:
        """Estimate the gradient of the mean loss, add it to `.grad`, and return the mean loss.

        `place` is (number of the first sample, number of all) in the batch that a group of processes shares. Without
        it they ask each other for it at every step, 8 bytes each.
        """
        task = Task(self.model, loss_fn, inputs, targets)
        if self.layout is None or not self.layout.members.current():
            self.layout = _layout(self.guess, task, self.sites)
        undo = self._remember(self.layout)
        try:
            result = self._run(task, self.layout, place)
        except Exception:
            undo()
            raise
        self.steps += 1
        if self.nonfinite != "ignore" and not _is_finite(result):
            undo()
            if self.nonfinite == "raise":
                _check_finite(result, f"step {self.steps - 1}")
            self.skipped += 1
            return result.loss
        self._write(result.grads)
        return result.loss

    def _remember(self, layout: Layout) -> Callable[[], None]:
        """A way back from a step that failed: its statistics and bases would spoil the next ones."""
        if self.nonfinite == "ignore":
            return lambda: None
        kept = [(store, _copy(store)) for store in (self.cache, self.learned)]
        buffers = Snapshot(self.model, random=False) if layout.mutates else None

        def undo() -> None:
            for store, copy in kept:
                _put_back(store, copy)
            if buffers is not None:
                buffers.restore_buffers()

        return undo

    def _run(self, task: Task, layout: Layout, place: tuple[int, int] | None) -> Estimate:
        parts = split(task, layout, self.chunk, self.pool, place)
        first = any(not self.cache.get(site.name) for site in layout.sites if site.linear is not None)
        whole = parts[0].rows is not None and self.guess.pools_at(self.steps, first)
        moments = gate_moments(parts, layout, self.pool) if whole else {}
        probe = first_samples(task, layout, self.pool, PROBE_ROWS) if whole else task
        start, fresh = Noise(self.generator), set[str]()
        results: list[Estimate] = []
        for part in parts:
            if results:
                start.rewind()
            noise = Noise(self.generator, part.rows, part.total) if part.rows is not None else start
            results.append(self._run_part(part, probe, noise, moments, fresh))
        return _combined(results, parts, self.pool)

    def _run_part(
        self, part: Part, whole: Task, noise: Noise, moments: Mapping[str, Tensor], fresh: set[str]
    ) -> Estimate:
        def step(layout: Layout) -> Step:
            return Step(
                part.task,
                layout,
                noise,
                self.options,
                self.cache,
                self.learned,
                self.steps,
                detail=False,
                pool=self.pool,
                share=part.share,
                whole=whole,
                moments=moments,
                fresh=fresh,
                scratch=self.scratch,
            )

        assert self.layout is not None
        result, self.layout = _settle(self.guess, part.task, self.sites, self.layout, noise, step)
        return result

    def _write(self, grads: Mapping[str, Tensor]) -> None:
        taken: set[int] = set()  # two parameters may have got one tensor: x + (a + b)
        assert self.layout is not None
        for name, grad in grads.items():
            parameter = self.layout.members.parameters[name]
            if parameter.grad is None:
                parameter.grad = grad.detach().clone() if grad.data_ptr() in taken else grad.detach()
                taken.add(grad.data_ptr())
            else:
                parameter.grad += grad

    def state_dict(self) -> dict[str, Tensor]:
        """All that lives from step to step, as a flat dict of tensors (safetensors can hold it)."""
        state = {
            "generator": self.generator.get_state(),
            "steps": torch.tensor(self.steps),
            "skipped": torch.tensor(self.skipped),
        }
        for kind, store in (("cache", self.cache), ("learned", self.learned)):
            for site, entries in store.items():
                state.update({f"{kind}/{site}/{key}": value.detach().clone() for key, value in entries.items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        missing = {"generator", "steps", "skipped"} - set(state)
        if missing:
            raise InputError(f"state: expected the keys of ForwardGradient.state_dict(), missing {sorted(missing)}.")
        stores: dict[str, Cache] = {"cache": {}, "learned": {}}
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if rest:
                site, _, name = rest.rpartition("/")
                stores[kind].setdefault(site, {})[name] = value.detach().clone().to(self.generator.device)
        self.generator.set_state(state["generator"].cpu().to(torch.uint8))
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
        self.cache, self.learned = stores["cache"], stores["learned"]


def _copy(store: Cache) -> Cache:
    return {site: {key: value.clone() for key, value in entries.items()} for site, entries in store.items()}


def _put_back(store: Cache, copy: Cache) -> None:
    """In place where possible: a captured step holds on to the tensors."""
    for site in set(store) - set(copy):
        del store[site]
    for site, entries in copy.items():
        now = store.setdefault(site, {})
        for key in set(now) - set(entries):
            del now[key]
        for key, value in entries.items():
            if key in now and now[key].shape == value.shape:
                now[key].copy_(value)
            else:
                now[key] = value


def _check_guess(guess: Any) -> None:
    if not isinstance(guess, Method):
        hint = " Write WPerp(), with parentheses." if isinstance(guess, type) else ""
        raise InputError(f"guess: expected one of gradguess's methods, gg.WPerp() for instance, found {guess!r}.{hint}")


def _layout(guess: Method, task: Task, sites: Sites) -> Layout:
    return lay_out(task, sites) if guess.uses_sites else bare_layout(task)


def _settle(
    guess: Method, task: Task, sites: Sites, layout: Layout, noise: Noise, step: Callable[[Layout], Step]
) -> tuple[Estimate, Layout]:
    """Run. Where the model makes other calls than when it was laid out, lay it out anew; at last on the whole batch."""
    before = Snapshot(task.model) if layout.stochastic or layout.mutates else None
    for whole in (False, True):
        try:
            return _run(guess, step(layout)), layout
        except LayoutChanged:  # control flow that depends on the data
            noise.rewind()
            if before is not None:
                before.restore_random()
                before.restore_buffers()
            layout = lay_out(task, sites, whole=whole)
    try:
        return _run(guess, step(layout)), layout
    except LayoutChanged:
        raise InputError(
            "The model called other modules each time it ran on the same batch. Make its control flow depend on its "
            "inputs and on PyTorch's random numbers alone."
        ) from None


def _run(guess: Method, step: Step) -> Estimate:
    """A factorisation that failed on NaN gives an estimate that says so."""
    try:
        return guess.run(step)
    except torch.linalg.LinAlgError:
        with untouched(step.task.model), torch.no_grad():
            losses = step.task.losses(step.task.outputs())
        if torch.isfinite(losses).all():
            raise
        return Estimate(losses.mean(), {}, losses.new_zeros(0, len(losses)), losses=losses)


def _combined(results: list[Estimate], parts: list[Part], pool: Pool) -> Estimate:
    """The estimate of the whole batch from those of its parts."""
    if len(results) == 1 and pool.size == 1 and parts[0].rows is None:
        return results[0]
    grads: dict[str, Tensor] = {}
    for result, part in zip(results, parts, strict=True):
        for name, grad in result.grads.items():
            weighted = grad if result.shared else grad * part.share
            grads[name] = grads[name].add_(weighted) if name in grads else weighted
    losses = torch.cat([result.losses for result in results if result.losses is not None])
    jvp = torch.cat([result.jvp for result in results], 1)
    whole = Estimate(losses.mean(), grads, jvp, losses=losses)
    if results[0].shared:
        whole.fine = torch.stack([result.fine for result in results if result.fine is not None]).all()
    elif pool.size > 1:
        whole.grads, whole.fine = add_up(pool, grads, torch.isfinite(losses).all() & torch.isfinite(jvp).all())
    return whole


def _is_finite(result: Estimate) -> bool:
    assert result.losses is not None
    if result.fine is not None:
        return bool(result.fine)  # the processes must not differ in this
    if math.isfinite(float(result.losses.sum() + result.jvp.sum())):  # else the sum itself may have overflowed
        return True
    return bool(torch.isfinite(result.losses).all() & torch.isfinite(result.jvp).all())


def _check_finite(result: Estimate, where: str) -> None:
    if _is_finite(result):
        return
    assert result.losses is not None
    what = "loss" if not torch.isfinite(result.losses).all() else "directional derivative"
    values: Callable[[Tensor], int] = lambda t: int((~torch.isfinite(t)).sum())  # noqa: E731
    bad = values(result.losses) or values(result.jvp)
    if not bad:
        raise NonFiniteError(f"Another process met a NaN or infinite loss or derivative at {where}; see its error.")
    raise NonFiniteError(
        f"The {what} of {bad} sample(s) at {where} is NaN or infinite. Check the data and the learning rate, or "
        "skip such steps with gg.ForwardGradient(..., nonfinite='skip')."
    )
