"""`Online`: a recurrent model that learns from endless streams, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.backends.policy import one_at_a_time
from gradguess.backends.tracing import reason_of
from gradguess.errors import GradguessError, InputError
from gradguess.model.task import LossFn, check_trainable
from gradguess.online.later import Later, learn, write
from gradguess.online.one_step import OneStep
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition
from gradguess.online.state_tree import StateTree, batch_of
from gradguess.online.transition import run
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
        self._state: Kept | None = None  # of the streams, as rows
        self._start = Kept()  # the state in which they start
        self._kept = Kept()  # what the rule keeps for them
        self._tree: StateTree | None = None
        self._trained: frozenset[str] = frozenset()  # the parameters that required a gradient at the first step
        self._recurrent: tuple[str, ...] = ()  # those of them that the state depends on
        self._held: tuple[Kept, Transition] | None = None  # the last step, if it had no loss

    @property
    def state(self) -> Any:
        """A copy of the state, as the model returned it; None before the first step, and after loading."""
        return None if self._tree is None or self._state is None else self._tree.tree(self._state.rows)

    @property
    def kept_bytes(self) -> int:
        """The size of what lives from step to step: influence, basis and state."""
        parts = () if self._state is None else (self._state.rows, self._kept.rows, self._kept.shared)
        return sum(value.nbytes for part in parts for value in part.values())

    @one_at_a_time
    def __call__(self, loss_fn: LossFn | None, x: Any, target: Any = None) -> Tensor:
        """Take one step of every stream. Returns the mean loss, or NaN where there is none.

        Args:
            loss_fn: `loss_fn(output, target)` returns one loss per stream. It may be None where `target` is.
            x: the input of this step, a tensor or a tree of tensors with one row per stream.
            target: of the loss. None steps without a loss; `later` can supply it.
        """
        x = tree_map_only(Tensor, Tensor.detach, x)
        streams, self._held, weights = batch_of(x), None, _trained(self.model)
        tree, state = self._ready(x, streams)
        if target is None:  # `later` may need input and weights of this step after they have changed
            x = tree_map_only(Tensor, torch.clone, x)
            weights = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
        place = (state.rows, x, self.generator, self.steps)
        step = Transition(self.model, tree, weights, self._recurrent, *place, write=True)
        output, finite = step.output, step.finite
        loss, error, unjudged = step.h.new_full((), float("nan")), None, 0
        grads: Tensors = {}
        if not bool(finite.all()):
            step = step.part(finite.nonzero()[:, 0])
        if step.batch:
            kept = self._kept.select(step.index)
            if target is not None:
                if loss_fn is None:
                    raise InputError("loss_fn: expected a function of (output, target), found None beside a target.")
                loss, grads, error, unjudged = learn(self._rule, kept, step, loss_fn, target, streams)
            seen = self._rule.look(self._kept, error, step)
            after = self._rule.advance(seen.select(step.index), step)
            write(self.model, grads)
            self._kept = seen.replace(step.index, after)
            after = Kept({name: value.detach() for name, value in step.after.items()})
            self._state = state.replace(step.index, after)
            self._held = (kept, step) if target is None else None
        self.steps += 1
        self.skipped += streams - step.batch + unjudged
        self.output = tree_map_only(Tensor, Tensor.detach, output)
        return loss

    def later(self) -> Later:
        """Hold the last step, which had no loss, for a loss that arrives later, such as a reward.

        >>> import torch, gradguess as gg
        >>> model = gg.online.Recurrent(torch.nn.RNNCell(2, 4), torch.nn.Linear(4, 3))
        >>> online = gg.online.Online(model, gg.online.RTRL())
        >>> _ = online(None, torch.randn(1, 2))
        >>> held = online.later()
        >>> _ = online(None, torch.randn(1, 2))
        >>> loss = held(lambda output, reward: -reward * output.log_softmax(1)[:, 0], torch.ones(1))
        """
        if self._held is None or self._state is None:
            raise InputError("later: the last step has a loss, or there is none yet. Step with target=None first.")
        return Later(self._rule, *self._held, len(self._state.rows["h"]), self._learned)

    def reset(self, rows: Any = None) -> None:
        """Start streams anew where an episode ends: their state is that of the very first step, their influence zero.

        Args:
            rows: numbers of streams, or a mask (streams,) of bool; None: all.
        """
        if self._state is not None:
            index = _numbers(rows, self._state.rows["h"])
            self._kept = self._kept.cleared(index)
            self._state = self._state.replace(index, self._start.select(index))

    def state_dict(self) -> dict[str, Tensor]:
        """All that lives from step to step, as a flat dict of tensors (safetensors can hold it).

        Save the model and the optimiser beside it; the stream then goes on bit for bit.
        """
        state = {"generator": self.generator.get_state(), "steps": torch.tensor(self.steps)}
        state["skipped"] = torch.tensor(self.skipped)
        if self._state is not None:
            parts = {"now": self._state.rows, "start": self._start.rows}
            parts |= {"rows": self._kept.rows, "shared": self._kept.shared}
            state |= {f"{part}/{name}": v.clone() for part, values in parts.items() for name, v in values.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        missing = {"generator", "steps", "skipped"} - set(state)
        if missing:
            raise InputError(f"state: expected the keys of Online.state_dict(), missing {sorted(missing)}.")
        device = self.generator.device

        def under(prefix: str) -> Tensors:
            return {k.removeprefix(prefix): v.clone().to(device) for k, v in state.items() if k.startswith(prefix)}

        self.generator.set_state(random_state(state["generator"], device))
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
        self._tree = self._held = self.output = None
        self._state = Kept(under("now/")) if "now/h" in state else None
        self._start, self._kept = Kept(under("start/")), Kept(under("rows/"), under("shared/"))

    @property
    def _rule(self) -> Rule:
        """Without parameters that the state depends on there is no influence."""
        return self.rule if self._recurrent else OneStep()

    def _learned(self, error: Error, transition: Transition) -> None:
        """A loss that arrived late says where errors point, too."""
        if self._tree is not None:
            self._kept = self._rule.hear(self._kept, error, transition)

    def _ready(self, x: Any, streams: int) -> tuple[StateTree, Kept]:
        """The state of the streams. The first step finds out what it looks like and what it depends on."""
        if self._state is not None and (before := len(self._state.rows["h"])) != streams:
            raise InputError(
                f"x: expected {before} streams, as before, found {streams}. For a stream that has "
                "ended pass a row of NaN, which is skipped; or make a new Online for the streams that are left."
            )
        weights = _trained(self.model)
        changed = (set(weights) - self._trained) | (set(self._recurrent) - set(weights))
        if self._tree is not None and changed:
            raise InputError(
                f"model: {', '.join(sorted(changed))} started or ceased to require a gradient since the first step. "
                "What is kept of the past does not fit any more: make a new Online."
            )
        if self._tree is None:
            state = self._initial(x, streams)
            tree = StateTree.of(state)
            tree.check(state, streams)
            start = Kept(tree.rows(state))
            drawn = self.generator if self._state is None else torch.Generator(self.generator.device)
            probe = Transition(self.model, tree, weights, (), start.rows, x, drawn, 0)
            self._trained, self._recurrent = frozenset(weights), probe.depends_on()
            kept = self._rule.start(replace(probe, recurrent=self._recurrent))
            if self._state is None:
                self._state, self._start, self._kept = start, start, kept
            elif (_shapes(self._state), _shapes(self._kept)) != (_shapes(start), _shapes(kept)):
                raise InputError("state: what was loaded was saved with another rule or model. Use the same ones.")
            self._tree = tree
        assert self._state is not None
        return self._tree, self._state

    def _initial(self, x: Any, streams: int) -> Any:
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


def _numbers(rows: Any, h: Tensor) -> Tensor:
    """Numbers of streams from numbers, a mask, or None."""
    if rows is None:
        return torch.arange(h.shape[0], device=h.device)
    index = torch.as_tensor(rows, device=h.device)
    if index.dtype == torch.bool and index.shape == h.shape[:1]:
        return index.nonzero()[:, 0]
    index = index.reshape(-1)
    whole = not index.dtype.is_floating_point and index.dtype != torch.bool
    if len(index) and not (whole and int(index.min()) >= 0 and int(index.max()) < h.shape[0]):
        raise InputError(
            f"rows: expected numbers from 0 to {h.shape[0] - 1} or a mask of {h.shape[0]}, found {rows!r}."
        )
    return index.long()


def _trained(model: nn.Module) -> Tensors:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _shapes(kept: Kept) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in {**kept.rows, **kept.shared}.items()}
