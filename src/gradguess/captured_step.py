"""A whole training step, draw and update included, recorded once and launched at once from then on.

A step of a small network is a few hundred kernels of a few microseconds: launched one by one they wait for Python.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from gradguess.backends.cuda_graphs import CannotRecord, Recording, on_side_stream, require
from gradguess.backends.policy import one_at_a_time
from gradguess.compile.compiler import Compiler
from gradguess.compile.signature import Signatures
from gradguess.compile.trace import NotTraceable
from gradguess.errors import InputError, check_count, warn
from gradguess.estimate import ForwardGradient
from gradguess.model.site import Members
from gradguess.model.task import LossFn, Task
from gradguess.step.base import Kept, State
from gradguess.step.refresh import sketch_seed

MOST = 64  # kinds of steps that are told apart
RATES_IN_TENSORS = (torch.optim.Adam, torch.optim.SGD)  # and AdamW; rates of others are recorded as numbers
WARM_UP = 3  # steps before a recording: libraries set themselves up, optimisers make their state


class CapturedStep:
    """A training step, `forward` and then `optimiser.step()`, replayed from a CUDA graph.

    The result is that of the same calls made one by one. The first steps of each kind and shape run by themselves.
    So do steps that cannot be recorded: those of a guess that is not steady; searches for a basis that cannot start
    from the one before (it has more than half as many directions as there can be, or lacks some); those with
    `derivative="finite"`; and, of a model with dropout or batch norm, those that refresh a basis, and all others unless
    `forward` has `compile=True` or the method runs the model once.
    A recording is replayed where all that it assumes still holds: `compile.signature`, the memory of all tensors, and
    the optimiser's options. Where something differs the step runs by itself, and is recorded anew. Rates are read from
    tensors, which schedulers fill: they act at once.

    Gradients are set to None before each update, and what `.grad` holds after it is not for reading: recordings share
    their memory. It does not look for NaN, since that would wait for the device.

    Args:
        forward: a `ForwardGradient` of a model on CUDA, with `memory="store"`, one process and no `chunk`.
        optimiser: an optimiser of the same parameters, made with `capturable=True`; SGD with `fused=True`. The rates of
            Adam, AdamW and SGD are put into tensors.
        loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
        clip: the most that the norm of all gradients may be; longer ones are scaled to it.
        accumulate: the number of calls whose gradients are averaged before the optimiser makes a step.
    """

    def __init__(
        self,
        forward: ForwardGradient,
        optimiser: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> None:
        require(forward.generator.device, "CapturedStep")
        check_count("accumulate", accumulate)
        if clip is not None and not clip > 0:
            raise InputError(f"clip: expected a positive number or None, found {clip!r}.")
        if forward.plan.options.memory != "store":
            raise InputError("CapturedStep needs memory='store': a replayed pass cannot be captured.")
        if forward.plan.pool.size > 1 or forward.plan.chunk is not None:
            raise InputError("CapturedStep needs one process and chunk=None: parts of a batch cannot be captured.")
        self._optimiser = _Optimiser(optimiser, forward.generator.device)
        self.forward, self.optimiser, self.loss_fn = forward, optimiser, loss_fn
        self.clip, self.accumulate = clip, accumulate
        self.captured: dict[Hashable, tuple[Recording[Tensor], Any]] = {}  # and the batch that it reads
        self.seen: dict[Hashable, int] = {}
        self.alone: set[Hashable] = set()  # what could not be recorded
        self._signatures = Signatures()
        self._memory: list[int] = []  # where the tensors lie that the recordings read and write
        self._calls = 0
        self._full: Callable[[], dict[str, bool]] | None = None  # None where that must be looked up
        self.state = forward.state  # its tensors are those that the recordings read and write

    @one_at_a_time
    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Make one training step and return the mean loss, which is valid until the next step.

        Args:
            inputs: of the model, on its device. Steps are recorded once for each shape.
            targets: of the loss.
        """
        if self.forward.state is not self.state:  # a state was loaded
            self._settle(self.forward.state)
            self._full = None
        kind = self.forward.plan.method.kind(self.forward.steps)
        self._optimiser.prepare()
        captured = None if kind is None else self._recorded(kind, inputs, targets)
        if captured is None:
            self._full = None
            loss = on_side_stream(lambda: self._step(inputs, targets))
        else:
            if kind == "refresh" and (drawn := self.forward.plan.method.draws(self.forward.steps)) is not None:
                self.forward.sketching.manual_seed(sketch_seed(drawn.count))  # as a search that is not replayed has it
            recording, batch = captured
            tree_map(lambda own, new: isinstance(own, Tensor) and own.copy_(new), batch, (inputs, targets))
            loss = recording.replay()
            self.optimiser._opt_called = True  # type: ignore[attr-defined]  # for schedulers: a replay does not call it
            self._settle(State(self.state.kept, self.state.learned, self.state.count + 1))
            if kind == "refresh":
                self._full = _full_bases(self.state.kept)
        self._calls += 1
        return loss

    def _recorded(self, kind: str, inputs: Any, targets: Any) -> tuple[Recording[Tensor], Any] | None:
        """The recording of this kind of step, made now if it is time; None if the step has to run by itself."""
        layout = self.forward.layout
        if layout is None or not layout.members.current():  # the step finds its sites anew
            return None
        if (memory := self._addresses(layout.members)) != self._memory:
            self.captured.clear()
            self._memory = memory
        task = Task(self.forward.model, self.loss_fn, inputs, targets)
        try:
            assumed = self._signatures.of_step(task, layout)
        except NotTraceable as reason:
            raise InputError(f"CapturedStep: {reason}") from None
        key = kind, self._first_and_last(), self.clip, self._optimiser.key(), assumed
        if key not in self.seen and len(self.seen) == MOST:
            last = self._signatures.changed or "the batch, the optimiser or what is frozen"
            warn(
                f"CapturedStep: {MOST} steps were each of another kind, and none was replayed since. What changed last "
                f"is {last}. Other kinds run by themselves, with the same result."
            )
        if key not in self.seen and len(self.seen) > MOST:
            return None
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= WARM_UP or key in self.alone or self._is_fragile(kind) or self._lacks(kind == "refresh"):
            return None
        if key not in self.captured:
            try:
                self.captured[key] = self._capture(inputs, targets)
            except CannotRecord:
                self.alone.add(key)
        return self.captured.get(key)

    def _first_and_last(self) -> tuple[bool, bool]:
        """Whether this call is the first, and the last, before an update."""
        return self._calls % self.accumulate == 0, (self._calls + 1) % self.accumulate == 0

    def _addresses(self, members: Members) -> list[int]:
        """Where parameters, buffers, gradients that wait and the state of the optimiser lie."""
        own = members.parameters.values()
        waiting = [p.grad for p in own if p.grad is not None] if self.accumulate > 1 else []
        return [t.data_ptr() for t in (*own, *members.buffers().values(), *waiting, *self._optimiser.state())]

    def _lacks(self, search: bool) -> bool:
        """Whether a basis lacks directions. A recording takes each to be full, where a step by itself looks: a search
        at all of them, other steps at those that span the whole space.
        """
        kept = self.state.kept.items()
        asked = [site for site, V in kept if "basis" in V and (search or len(V["basis"]) == V["basis"].shape[1])]
        if not asked:
            return False
        self._full = self._full or _full_bases(self.state.kept)
        full = self._full()
        return not all(full[site] for site in asked)

    def _is_fragile(self, kind: str) -> bool:
        """Whether this step must run by itself. Unknown kernels, for which finite differences are, cannot be recorded,
        nor can passes that put random state and buffers back. In a compiled step these enter and leave a graph, of
        which a search is no part; a method that makes one pass puts nothing back.
        """
        layout, plan = self.forward.layout, self.forward.plan
        if layout is None or plan.options.finite:
            return True
        compiled = isinstance(plan.runner, Compiler) and not plan.runner.refused and kind != "refresh"
        pure = compiled or plan.method.one_pass
        return bool(layout.sites) and layout.leaves_traces and not pure

    def _step(self, inputs: Any, targets: Any) -> Tensor:
        first, last = self._first_and_last()
        if first:
            self.optimiser.zero_grad(set_to_none=self.accumulate == 1)  # gradients that wait stay where they are
        loss = self.forward.step(self.loss_fn, inputs, targets, nonfinite="ignore")
        self._settle(self.forward.state)
        if last:
            own = list(self.forward.model.parameters())
            if self.accumulate > 1:
                torch._foreach_div_([p.grad for p in own if p.grad is not None], float(self.accumulate))
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(own, self.clip)
            self.optimiser.step()
        return loss

    def _settle(self, new: State) -> None:
        """Take over a state, in the memory of the one before where it fits: recordings hold on to that."""
        kept, learned = _write_into(self.state.kept, new.kept), _write_into(self.state.learned, new.learned)
        if _replaced(self.state.kept, kept) or _replaced(self.state.learned, learned):
            self.captured.clear()  # they read and write tensors that are of no use any more
            self.seen.clear()
        self.state = self.forward.state = State(kept, learned, new.count)

    def _capture(self, *batch: Any) -> tuple[Recording[Tensor], Any]:
        batch, before = tree_map_only(Tensor, torch.clone, batch), self.state
        beside = next((recording for recording, _ in self.captured.values()), None)
        try:
            generators = (self.forward.generator, self.forward.sketching)
            return Recording(lambda: self._step(*batch), *generators, beside=beside), batch
        finally:
            self.state = self.forward.state = before  # recording computes nothing


class _Optimiser:
    """What a recording assumes of an optimiser, and the tensors that it reads."""

    def __init__(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimiser, self._device = optimiser, device
        self._rates: dict[int, Tensor] = {}  # by group
        if not all(group.get("capturable", group.get("fused")) for group in optimiser.param_groups):
            raise InputError(
                "CapturedStep needs an optimiser made with capturable=True, or, where it has no such option (SGD), "
                "with fused=True."
            )

    def prepare(self) -> None:
        """Put rates that are numbers, or other tensors than before, into the tensors that recordings read."""
        groups = self.optimiser.param_groups if isinstance(self.optimiser, RATES_IN_TENSORS) else []
        for number, group in enumerate(groups):
            rate, own = group["lr"], self._rates.get(number)
            if own is None:
                dtype = rate.dtype if isinstance(rate, Tensor) else torch.float32
                own = self._rates[number] = torch.as_tensor(rate, dtype=dtype, device=self._device)
            if rate is not own:
                own.copy_(torch.as_tensor(rate))
                group["lr"] = own

    def state(self) -> list[Tensor]:
        """The tensors that a step reads and writes besides parameters and gradients."""
        return [t for values in self.optimiser.state.values() for t in values.values() if isinstance(t, Tensor)]

    def key(self) -> Hashable:
        """Parameters and options of each group: a recording has the numbers among them as they were."""
        return tuple(
            (tuple(map(id, group["params"])), *(_hashable(group.get(name)) for name in self.optimiser.defaults))
            for group in self.optimiser.param_groups  # schedulers add options that are no defaults
        )


def _hashable(option: Any) -> Hashable:
    return id(option) if isinstance(option, Tensor) else tuple(option) if isinstance(option, list) else option


def _full_bases(kept: Kept) -> Callable[[], dict[str, bool]]:
    """Asks the device which bases have no empty column. Returns a function that waits for the answer, by site."""
    bases = {site: values["basis"] for site, values in kept.items() if "basis" in values}
    sizes = [torch.linalg.vector_norm(V, dtype=torch.float64).square() for V in bases.values()]
    if not sizes:
        return dict
    full = torch.stack([size > V.shape[1] - 0.5 for size, V in zip(sizes, bases.values(), strict=True)])
    return cache(lambda: dict(zip(bases, full.tolist(), strict=True)))  # columns are orthonormal, or zero


def _write_into(old: Kept, new: Kept) -> Kept:
    """The new values, in the old tensors where these have the shape."""
    moved: list[tuple[Tensor, Tensor]] = []

    def place(there: Tensor | None, value: Tensor) -> Tensor:
        if there is None or there is value or there.shape != value.shape or there.dtype != value.dtype:
            return value
        moved.append((there, value))
        return there

    placed = {
        site: {key: place(old.get(site, {}).get(key), value) for key, value in values.items()}
        for site, values in new.items()
    }
    if moved:  # by one kernel for all of them
        torch._foreach_copy_([there for there, _ in moved], [value for _, value in moved])
    return placed


def _replaced(old: Kept, new: Kept) -> bool:
    """Whether another tensor came into the place of an old one, as one of another shape or precision does."""
    return any(new.get(site, {}).get(key, there) is not there for site in old for key, there in old[site].items())
