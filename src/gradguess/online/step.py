"""One step of some streams: run the model, and learn from its loss. `Later` holds one for a loss that comes later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradguess.backends.policy import one_at_a_time
from gradguess.errors import InputError, NonFiniteError
from gradguess.model.task import LossFn, rows_of
from gradguess.online.rule import Error, Kept, Rule, Tensors
from gradguess.online.state_tree import StateTree, finite_rows
from gradguess.online.transition import Transition, losses_of, run


@dataclass(frozen=True)
class Place:
    """Where streams stand: their state, and what the rule keeps for them."""

    h: Tensor  # (streams, n)
    others: tuple[Tensor, ...]
    kept: Kept

    def select(self, rows: Tensor) -> Place:
        return Place(self.h[rows], tuple(leaf[rows] for leaf in self.others), self.kept.select(rows))

    def replace(self, rows: Tensor, part: Place) -> Place:
        """The streams `rows` as they are in `part`, the others as they are here."""
        others = tuple(old.index_copy(0, rows, new) for old, new in zip(self.others, part.others, strict=True))
        return Place(self.h.index_copy(0, rows, part.h), others, self.kept.replace(rows, part.kept))

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """All of them, by name or number."""
        return {**dict(enumerate((self.h, *self.others))), **self.kept.rows, **self.kept.shared}

    def looks_like(self, other: Place) -> bool:
        """Are there the same tensors, with the same shapes and dtypes?"""
        mine, others = ({k: (v.shape, v.dtype) for k, v in place.tensors.items()} for place in (self, other))
        return mine == others


@dataclass(frozen=True)
class Step:
    """One step from `place` with the input `x`; `output`, `after` and their graph exist once they are asked for."""

    model: nn.Module
    rule: Rule
    tree: StateTree
    recurrent: tuple[str, ...]  # names of the parameters that the state depends on
    place: Place
    x: Any
    generator: torch.Generator
    count: int
    index: Tensor | None = None  # numbers of the streams, where these are not all
    parameters: Mapping[str, Tensor] | None = None  # in the place of the model's own
    write: bool = False  # may the model write its buffers?

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        if self.parameters is not None:
            return dict(self.parameters)
        return trained(self.model)

    @cached_property
    def _leaf(self) -> Tensor:
        return self.place.h.detach().requires_grad_()

    @cached_property
    def _ran(self) -> tuple[Any, Any]:
        with torch.enable_grad():
            before = self.tree.tree(self._leaf, self.place.others)
            output, state = run(self.model, self._weights, self.x, before, self.write)
        self.tree.check(state, self.batch)
        return output, state

    @property
    def batch(self) -> int:
        return self.place.h.shape[0]

    @property
    def output(self) -> Any:
        return self._ran[0]

    @property
    def after(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The new state, detached."""
        state = self._ran[1]
        return self.tree.vector(state).detach(), tuple(leaf.detach() for leaf in self.tree.others(state))

    @property
    def finite(self) -> Tensor:
        """(streams,): are input, output and new state of the stream finite?"""
        return finite_rows((self.x, self._ran), self.batch)

    @cached_property
    def transition(self) -> Transition:
        weights = {name: self._weights[name].detach() for name in self.recurrent}
        h, others = self.place.h, self.place.others
        return Transition(self.model, self.tree, weights, h, others, self.x, self.generator, self.count)

    def part(self, index: Tensor) -> Step:
        """The same step of some of the streams."""
        x = rows_of(self.x, index, self.batch)
        return dataclasses.replace(self, place=self.place.select(index), x=x, index=index, write=False)

    def depends_on(self) -> tuple[str, ...]:
        """Names of the parameters that the new state depends on. It must depend on the old state."""
        h = self.tree.vector(self._ran[1])
        ends = [self._leaf, *self._weights.values()]
        found = torch.autograd.grad(h.sum(), ends, allow_unused=True) if h.requires_grad else [None] * len(ends)
        if found[0] is None:
            raise InputError(
                "model: the state that forward(x, state) returns does not depend on the state that it is given. Use "
                "the state, without detaching it, or train the model as one without memory."
            )
        return tuple(name for name, grad in zip(self._weights, found[1:], strict=True) if grad is not None)

    def learn(self, loss_fn: LossFn, target: Any, streams: int) -> tuple[Tensor, Tensors, Error | None, int]:
        """Mean loss, gradients, the error at the state, and the number of streams whose loss was not finite.

        `target` has a row for each of the `streams` that there are in all.
        """
        if self.index is not None:
            target = rows_of(target, self.index, streams)
        with torch.enable_grad():
            losses = losses_of(self.model, loss_fn, self.x, self.output, target, self.batch)
            fine = torch.isfinite(losses.detach())
            bad = int((~fine).sum())
            if bad == self.batch:
                return self.place.h.new_full((), float("nan")), {}, None, bad
            if bad:  # a NaN times zero is a NaN: the loss must not see those rows
                rows = fine.nonzero()[:, 0]
                seen, wanted = (rows_of(tree, rows, self.batch) for tree in (self.output, target))
                losses = losses_of(self.model, loss_fn, self.x, seen, wanted, len(rows))
            loss = losses.mean()
        grads, error = self._backward(loss)
        for name, credit in self.rule.credit(self.place.kept, error, self.transition).items():
            grads[name] = grads[name] + credit.view_as(grads[name]).to(grads[name])
        if not bool(torch.stack([torch.isfinite(grad).all() for grad in grads.values()]).all()):
            raise NonFiniteError(
                f"The gradient at step {self.count} is NaN or infinite: the influence of the past has grown beyond all "
                "bounds, or the loss has. Nothing was changed. Lower the learning rate, or forget the past by reset()."
            )
        return loss.detach(), grads, error, bad

    def _backward(self, loss: Tensor) -> tuple[Tensors, Error]:
        """The newest step: exact gradients, and what goes back to the state and to the output."""
        if not loss.requires_grad:
            raise InputError("loss_fn: the loss depends neither on the model's parameters nor on its state.")
        single = (
            isinstance(self.output, Tensor) and self.output.requires_grad and self.output.shape[:1] == (self.batch,)
        )
        ends = [self._leaf, *self._weights.values(), *([self.output] if single else [])]
        found = torch.autograd.grad(loss, ends, retain_graph=True, allow_unused=True, materialize_grads=True)
        grads = dict(zip(self._weights, found[1:], strict=False))
        return grads, Error(found[0], found[-1].reshape(self.batch, -1).to(found[0]) if single else None)


class Later:
    """A step that waits for its loss. It holds the weights and the influence of its own step: one more of each.

    Calling it adds the gradient to `.grad`, as if the loss had been there at the step.
    """

    def __init__(self, step: Step, streams: int, learned: Callable[[Error, Transition], None]) -> None:
        self.step, self.streams, self._learned = step, streams, learned

    @property
    def output(self) -> Any:
        """The output of the step, of the streams that were not skipped."""
        return self.step.output

    @one_at_a_time
    def __call__(self, loss_fn: LossFn, target: Any) -> Tensor:
        """Add the gradient to `.grad`, and return the mean loss.

        Args:
            loss_fn: `loss_fn(output, target)` returns one loss per stream.
            target: of the loss.
        """
        loss, grads, error, _ = self.step.learn(loss_fn, target, self.streams)
        write(self.step.model, grads)
        if error is not None:
            self._learned(error, self.step.transition)
        return loss


def trained(model: nn.Module) -> Tensors:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def write(model: nn.Module, grads: Mapping[str, Tensor]) -> None:
    """Add to `.grad`."""
    parameters = dict(model.named_parameters())
    for name, grad in grads.items():
        p = parameters[name]
        p.grad = grad.detach().clone() if p.grad is None else p.grad + grad
