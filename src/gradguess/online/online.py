"""`Online`: a recurrent model that learns from endless streams, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.backends.policy import one_at_a_time
from gradguess.errors import GradguessError, InputError, NonFiniteError, reason_of
from gradguess.model.task import LossFn, check_trainable
from gradguess.online.rules import SHARED, Error, OneStep, Rule, Tensors, Transition, of_streams, with_streams
from gradguess.online.transition import StateTree, batch_of, run
from gradguess.step.saved import random_state


class Online:
    """Steps every stream by one, and adds the gradient of that step's loss to `.grad`, with credit for the past.

    Memory does not grow with time. The state is detached after each step: what links a loss to the steps before its
    own is the influence that the rule keeps. Weights may change after every step. The influence then says how the
    states depended on the weights *as they were* at each past step. With small changes that is close to the gradient
    for the weights of now. With frozen weights and `RTRL()` the gradients are those of backpropagation through the
    whole stream.

    A stream whose input, output or new state is not finite is skipped: it keeps its state and its influence, and the
    others learn. A stream whose loss alone is not finite moves on without a loss. `skipped` counts both.

    Args:
        model: `forward(x, state) -> (output, state)`; the state is a tensor or a tree of tensors with one row per
            stream. Streams start from `model.initial_state(streams)` where there is such a method, else from zeros of
            the shape that `forward(x, None)` returns. That state is taken once, before the first step, as a constant:
            if it holds parameters, they get no gradient from there. Rows must not depend on each other.
        rule: how the influence of the past is kept: `gg.online.RTRL()`, `WPerp(k=16)`, `SnAp(1)`, ...
        seed: of the generator for rules that draw.

    >>> import torch, gradguess as gg
    >>> model = gg.online.Recurrent(torch.nn.GRUCell(3, 8), torch.nn.Linear(8, 1))
    >>> online = gg.online.Online(model, gg.online.WPerp(k=4))
    >>> loss_fn = lambda output, target: ((output - target) ** 2).mean(1)
    >>> for _ in range(5):
    ...     loss = online(loss_fn, torch.randn(2, 3), torch.zeros(2, 1))
    >>> online.output.shape, online.state.shape, online.steps
    (torch.Size([2, 1]), torch.Size([2, 8]), 5)
    """

    def __init__(self, model: nn.Module, rule: Rule, seed: int = 0) -> None:
        check_trainable(model)
        if not isinstance(rule, Rule):
            hint = " Write RTRL(), with parentheses." if isinstance(rule, type) else ""
            raise InputError(f"rule: expected a rule of gg.online, RTRL() for instance, found {rule!r}.{hint}")
        self.model, self.rule = model, rule
        self.generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        self.steps = self.skipped = 0
        self.output: Any = None
        self._state = Tensors()  # of the model, as rows; empty before the first step
        self._start = Tensors()  # the state in which streams start
        self._memory = Tensors()  # of the rule
        self._tree: StateTree | None = None
        self._trained: frozenset[str] = frozenset()  # the parameters that required a gradient at the first step
        self._recurrent: tuple[str, ...] = ()  # those of them that the state depends on
        self._held: Later | None = None  # the last step, if it had no loss

    @property
    def state(self) -> Any:
        """A copy of the state, as the model returned it; None before the first step, and after loading."""
        return None if self._tree is None else self._tree.tree(self._state)

    @property
    def kept_bytes(self) -> int:
        """The size of what lives from step to step: influence, basis and state."""
        return sum(value.nbytes for value in (*self._state.values(), *self._memory.values()))

    @one_at_a_time
    def __call__(self, loss_fn: LossFn | None, x: Any, target: Any = None) -> Tensor:
        """Take one step of every stream. Returns the mean loss, or NaN where there is none.

        Args:
            loss_fn: `loss_fn(output, target)` returns one loss per stream. It may be None where `target` is.
            x: the input of this step, a tensor or a tree of tensors with one row per stream.
            target: of the loss. None steps without a loss; `later` can supply it.
        """
        x = tree_map_only(Tensor, Tensor.detach, x)
        streams, self._held = batch_of(x), None
        weights: Tensors = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tree = self._ready(x, weights, streams)
        if target is None:  # `later` may need input and weights of this step after they have changed
            x = tree_map_only(Tensor, torch.clone, x)
            weights = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
        given = (self._state, x, self.generator, self.steps)
        step = Transition(self.model, tree, weights, self._recurrent, *given, write=True)
        output, finite = step.output, step.finite
        loss, error, unjudged = step.h.new_full((), float("nan")), None, 0
        if not bool(finite.all()):
            step = step.part(finite.nonzero()[:, 0])
        if step.batch:
            memory, grads = of_streams(self._memory, step.index), Tensors()
            if target is not None:
                if loss_fn is None:
                    raise InputError("loss_fn: expected a function of (output, target), found None beside a target.")
                loss, grads, error, unjudged = self._learn(memory, step, loss_fn, target)
            seen = self._rule.look(self._memory, error, step)
            after = self._rule.advance(of_streams(seen, step.index), step)
            self._write(grads)
            self._memory = with_streams(seen, step.index, after)
            state = {name: value.detach() for name, value in step.after.items()}
            self._state = with_streams(self._state, step.index, state)
            self._held = Later(self, memory, step) if target is None else None
        self.steps += 1
        self.skipped += streams - step.batch + unjudged
        self.output = tree_map_only(Tensor, Tensor.detach, output)
        return loss

    def later(self) -> Later:
        """The last step, which had no loss, held for a loss that arrives later, such as a reward.

        >>> import torch, gradguess as gg
        >>> model = gg.online.Recurrent(torch.nn.RNNCell(2, 4), torch.nn.Linear(4, 3))
        >>> online = gg.online.Online(model, gg.online.RTRL())
        >>> _ = online(None, torch.randn(1, 2))
        >>> held = online.later()
        >>> _ = online(None, torch.randn(1, 2))
        >>> loss = held(lambda output, reward: -reward * output.log_softmax(1)[:, 0], torch.ones(1))
        """
        if self._held is None:
            raise InputError("later: the last step has a loss, or there is none yet. Step with target=None first.")
        return self._held

    def reset(self, rows: Any = None) -> None:
        """Start streams anew where an episode ends: their state is that of the very first step, their influence zero.

        Args:
            rows: numbers of streams, or a mask (streams,) of bool; None: all.
        """
        if self._state:
            index = _numbers(rows, self._state["h"])
            self._state = with_streams(self._state, index, of_streams(self._start, index))
            zero = {n: v if n.startswith(SHARED) else torch.zeros_like(v[index]) for n, v in self._memory.items()}
            self._memory = with_streams(self._memory, index, zero)

    def state_dict(self) -> dict[str, Tensor]:
        """All that lives from step to step, as a flat dict of tensors (safetensors can hold it).

        Save the model and the optimiser beside it; the stream then goes on bit for bit.
        """
        counts = {"steps": torch.tensor(self.steps), "skipped": torch.tensor(self.skipped)}
        state = {f"{part}/{n}": v for part, of in (("now", self._state), ("start", self._start)) for n, v in of.items()}
        state |= {name if name.startswith(SHARED) else f"rows/{name}": v for name, v in self._memory.items()}
        return {"generator": self.generator.get_state(), **counts, **{name: v.clone() for name, v in state.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        missing = {"generator", "steps", "skipped"} - set(state)
        if missing:
            raise InputError(f"state: expected the keys of Online.state_dict(), missing {sorted(missing)}.")
        device = self.generator.device

        def under(prefix: str) -> Tensors:
            return {n.removeprefix(prefix): v.clone().to(device) for n, v in state.items() if n.startswith(prefix)}

        self.generator.set_state(random_state(state["generator"], device))
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
        self._tree = self._held = self.output = None
        self._state, self._start = under("now/"), under("start/")
        self._memory = under("rows/") | {SHARED + name: value for name, value in under(SHARED).items()}

    @property
    def _rule(self) -> Rule:
        """The rule; one step of credit where the state depends on no parameter."""
        return self.rule if self._recurrent else OneStep()

    def _ready(self, x: Any, weights: Tensors, streams: int) -> StateTree:
        """The structure of the state. The first step finds it, and the parameters that the state depends on."""
        if self._state and (before := len(self._state["h"])) != streams:
            raise InputError(
                f"x: expected {before} streams, as before, found {streams}. For a stream that has "
                "ended pass a row of NaN, which is skipped; or make a new Online for the streams that are left."
            )
        if self._tree is not None:
            changed = (set(weights) - self._trained) | (set(self._recurrent) - set(weights))
            if changed:
                raise InputError(
                    f"model: {', '.join(sorted(changed))} started or ceased to require a gradient since the first "
                    "step. What is kept of the past does not fit any more: make a new Online."
                )
            return self._tree
        state = self._initial(x, streams)
        tree, loaded = StateTree.of(state, streams), bool(self._state)
        start = tree.rows(state)
        generator = torch.Generator(self.generator.device) if loaded else self.generator
        probe = Transition(self.model, tree, weights, (), start, x, generator, 0)
        self._trained, self._recurrent = frozenset(weights), probe.depends_on()
        memory = self._rule.start(replace(probe, recurrent=self._recurrent))
        if not loaded:
            self._state, self._start, self._memory = start, start, memory
        elif _kinds(self._state | self._memory) != _kinds(start | memory):
            raise InputError("state: what was loaded was saved with another rule or model. Use the same ones.")
        self._tree = tree
        return tree

    def _initial(self, x: Any, streams: int) -> Any:
        """The state in which streams start."""
        first: Any = getattr(self.model, "initial_state", None)
        if first is not None:
            return tree_map_only(Tensor, Tensor.detach, first(streams))
        try:
            with torch.no_grad():
                return tree_map_only(Tensor, torch.zeros_like, run(self.model, {}, x, None)[1])
        except GradguessError:
            raise
        except Exception as error:
            raise InputError(
                f"model: forward(x, None) failed ({reason_of(error)}). It must start a stream, or the "
                "model must have a method initial_state(streams) that returns the first state."
            ) from error

    def _learn(
        self, memory: Tensors, step: Transition, loss_fn: LossFn, target: Any
    ) -> tuple[Tensor, Tensors, Error | None, int]:
        """Mean loss, gradients, the error at the state, and the number of streams whose loss was not finite."""
        loss, grads, error, bad = step.differentiated(loss_fn, target)
        if error is None:
            return loss, grads, error, bad
        for name, credit in self._rule.credit(memory, error, step).items():
            grads[name] = grads[name] + credit.view_as(grads[name]).to(grads[name])
        if not bool(torch.stack([torch.isfinite(grad).all() for grad in grads.values()]).all()):
            raise NonFiniteError(
                f"The gradient at step {step.count} is NaN or infinite: the influence of the past has grown beyond all "
                "bounds, or the loss has. Nothing was changed. Lower the learning rate, or forget the past by reset()."
            )
        return loss, grads, error, bad

    def _write(self, grads: Mapping[str, Tensor]) -> None:
        """Adds to `.grad`."""
        for name, grad in grads.items():
            p = self.model.get_parameter(name)
            p.grad = grad.detach().clone() if p.grad is None else p.grad + grad


class Later:
    """A step that waits for its loss. It holds the weights and the influence of its own step: one more of each.

    Calling it adds the gradient to `.grad`, as if the loss had been there at the step.
    """

    def __init__(self, online: Online, memory: Tensors, step: Transition) -> None:
        self._online, self._memory, self._step = online, memory, step

    @property
    def output(self) -> Any:
        """The output of the step, of the streams that were not skipped."""
        return self._step.output

    @one_at_a_time
    def __call__(self, loss_fn: LossFn, target: Any) -> Tensor:
        """Add the gradient to `.grad`, and return the mean loss.

        Args:
            loss_fn: `loss_fn(output, target)` returns one loss per stream.
            target: of the loss.
        """
        online = self._online
        loss, grads, error, _ = online._learn(self._memory, self._step, loss_fn, target)
        online._write(grads)
        if error is not None and online._tree is not None:
            online._memory = online._rule.look_late(online._memory, error, self._step)
        return loss


def _kinds(memory: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor."""
    return {name: (value.shape, value.dtype) for name, value in memory.items()}


def _numbers(rows: Any, h: Tensor) -> Tensor:
    """Numbers of streams from numbers, a mask, or None."""
    if rows is None:
        return torch.arange(len(h), device=h.device)
    index = torch.as_tensor(rows, device=h.device)
    if index.dtype == torch.bool and index.shape == h.shape[:1]:
        return index.nonzero()[:, 0]
    index = index.reshape(-1)
    whole = not index.dtype.is_floating_point and index.dtype != torch.bool
    if len(index) and not (whole and int(index.min()) >= 0 and int(index.max()) < len(h)):
        raise InputError(f"rows: expected numbers from 0 to {len(h) - 1} or a mask of {len(h)}, found {rows!r}.")
    return index.long()
