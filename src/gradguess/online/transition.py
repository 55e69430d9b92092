"""One step of some streams, `h_{t-1} -> h_t`: the state as one vector for each stream, the step's output and gradient,
and products with its two Jacobians.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gradguess.errors import ForwardModeError, GradguessError, InputError
from gradguess.model.task import LossFn, Task, rows_of, tensors
from gradguess.online.cut_products import CutProducts
from gradguess.passes.forward_mode import quiet_jvp

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StateTree:
    """The structure of a state: the tree, and the shape of each leaf for one stream with its dtype.

    Floating-point leaves make up the vector `h`, in order. Others, such as a counter, are carried beside it.
    """

    spec: TreeSpec
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(state: Any, streams: int) -> StateTree:
        """The structure of the first state."""
        leaves, spec = tree_flatten(state)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (streams,):
                raise InputError(
                    f"state: expected tensors with one row per stream, {streams}, found {_described(leaf)}."
                )
            if leaf.is_complex():
                raise InputError("state: expected real tensors, found a complex one. Use torch.view_as_real on it.")
        if not tensors(leaves):
            raise InputError("state: expected at least one floating-point tensor, found none: nothing can be learned.")
        return StateTree(spec, tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves))

    def check(self, state: Any, batch: int) -> None:
        """Refuses a state of another structure."""
        leaves, spec = tree_flatten(state)
        expected = [((batch, *shape), dtype) for shape, dtype in self.kinds]
        found = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
        if spec != self.spec or found != expected:
            raise InputError(
                f"The state changed its shape or dtype: expected {expected}, found {found}. forward(x, state) must "
                "return a state that looks like the first one and the one it was given, with one row per stream."
            )

    def vector(self, state: Any) -> Tensor:
        """`h`, (batch, n)."""
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in tensors(state)], 1)

    def rows(self, state: Any) -> dict[str, Tensor]:
        """The state by name: "h" is the vector, "others/0" and so on are the leaves that are not in it."""
        others = [leaf for leaf in tree_leaves(state) if not leaf.is_floating_point()]
        return {"h": self.vector(state), **{f"others/{i}": leaf for i, leaf in enumerate(others)}}

    def tree(self, rows: Mapping[str, Tensor]) -> Any:
        """The state with these rows. It is a copy: a model may write into the state that it is given."""
        h = rows["h"]
        parts = iter(h.split([prod(shape) for shape, dtype in self.kinds if dtype.is_floating_point], 1))
        others = (rows[f"others/{i}"] for i in range(len(rows) - 1))
        leaves = [
            (next(parts).reshape(len(h), *shape) if dtype.is_floating_point else next(others)).to(dtype, copy=True)
            for shape, dtype in self.kinds
        ]
        return tree_unflatten(leaves, self.spec)


def batch_of(x: Any) -> int:
    """The number of streams: rows of every tensor of the input."""
    leaves = tree_leaves(x)
    counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        found = [_described(leaf) for leaf in leaves] or "nothing"
        raise InputError(f"x: expected tensors with one row per stream, shape (streams, ...), found {found}.")
    return int(counts.pop())


def finite_rows(tree: Any, batch: int) -> Tensor:
    """(batch,): whether every number in the row is finite."""
    rows = [leaf.detach() for leaf in tensors(tree) if leaf.shape[:1] == (batch,)]
    return torch.stack([torch.isfinite(row)[:, None].flatten(1).all(1) for row in rows]).all(0)


def _described(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


@dataclass(frozen=True)
class Error:
    """The derivatives of a step's mean loss.

    Attributes:
        q: `dL_t/dh_{t-1}`, (batch, n): the error that goes back to the state before the step.
        e: `dL_t/d output`, (batch, outputs); None where the output is no single tensor.
    """

    q: Tensor
    e: Tensor | None


@dataclass(frozen=True)
class Transition:
    """The step from `h_{t-1}` to `h_t`.

    `J = ∂h_t/∂h_{t-1}` is (n, n) and `F = ∂h_t/∂θ` is (n, p), for each stream. Rules ask for products from the left,
    all of them in one vectorised reverse pass; neither Jacobian is formed unless a rule asks for all of its rows.

    Attributes:
        model: the user's.
        tree: the structure of the state.
        weights: the parameters that require a gradient, by name.
        recurrent: the names of those that the state depends on.
        state: before the step, as rows: "h" (batch, n), and the leaves that are not floating-point.
        x: the input of the step.
        generator: for rules that draw.
        count: steps that were made before this one.
        index: numbers of the streams, where these are not all.
        streams: how many there are in all, where these are not all.
        write: whether the model may write its buffers, when it is run for `output` and `after`.
    """

    model: nn.Module
    tree: StateTree
    weights: Mapping[str, Tensor]
    recurrent: tuple[str, ...]
    state: Mapping[str, Tensor]
    x: Any
    generator: torch.Generator
    count: int
    index: Tensor | None = None
    streams: int = 0
    write: bool = False

    @property
    def h(self) -> Tensor:
        """The state before the step, (batch, n)."""
        return self.state["h"]

    @property
    def batch(self) -> int:
        return self.h.shape[0]

    @property
    def width(self) -> int:
        """`n`."""
        return self.h.shape[1]

    @property
    def parameters(self) -> Tensors:
        """The weights that the state depends on, by name, detached."""
        return {name: self.weights[name].detach() for name in self.recurrent}

    def part(self, index: Tensor) -> Transition:
        """The same step of some of the streams."""
        state, x = {name: value[index] for name, value in self.state.items()}, rows_of(self.x, index, self.batch)
        return replace(self, state=state, x=x, index=index, streams=self.batch, write=False)

    # --- products with the Jacobians ---------------------------------------------------------------------------

    def vjps(self, cotangents: Tensor, cut: bool = False, of_state: bool = False) -> tuple[Tensor, Tensors]:
        """`c J` and `c F` for each cotangent `c`.

        Args:
            cotangents: (m, n), the same for all streams, or (batch, m, n).
            cut: take the state that enters a product with weights as a constant.
            of_state: `c J` alone.

        Returns:
            (batch, m, n), and for each parameter (batch, m, its size).
        """
        fixed, dtype = self.parameters, self.h.dtype
        parameters = {} if of_state else fixed

        def of_one(state: Tensors, x: Any, c: Tensor) -> tuple[Tensor, Tensors]:
            """The products of one stream: the model sees a batch of one."""
            x = tree_map_only(Tensor, lambda leaf: leaf[None], x)

            def step(p: Tensors, h: Tensor) -> Tensor:
                before = self.tree.tree({name: value[None] for name, value in {**state, "h": h}.items()})
                with CutProducts((x, before)) if cut else contextlib.nullcontext():
                    after = run(self.model, {**fixed, **p}, x, before)[1]
                return self.tree.vector(after)[0]

            made: Any = torch.func.vjp(step, parameters, state["h"])
            to_parameters, to_state = torch.func.vmap(made[1])(c)
            return to_state, {name: grad.reshape(len(grad), -1).to(dtype) for name, grad in to_parameters.items()}

        with explained():
            in_dims = (0, 0, None if cotangents.dim() == 2 else 0)
            return torch.func.vmap(of_one, in_dims)(dict(self.state), self.x, cotangents)

    @property
    def identity(self) -> Tensor:
        """(n, n)."""
        return torch.eye(self.width, dtype=self.h.dtype, device=self.h.device)

    def jacobian(self) -> Tensor:
        """`J`, (batch, n, n)."""
        return self.vjps(self.identity, of_state=True)[0]

    def vjp(self, cotangent: Tensor) -> tuple[Tensor, Tensors]:
        """`c J` for one cotangent `c` (batch, n) of each stream, and `c F` summed over the streams."""
        leaves = {name: p.requires_grad_() for name, p in self.parameters.items()}
        step = replace(self, weights={**self.weights, **leaves}, write=False)
        to_state, *grads = torch.autograd.grad(
            step.after["h"], [step._leaf, *leaves.values()], cotangent, allow_unused=True, materialize_grads=True
        )
        return to_state, dict(zip(leaves, grads, strict=True))

    def jvp(self, tangent: Tensor) -> Tensor:
        """`J s` for one direction `s` (batch, n) of each stream."""

        def step(h: Tensor) -> Tensor:
            return self.tree.vector(run(self.model, self.parameters, self.x, self.tree.tree({**self.state, "h": h}))[1])

        with explained():
            moved: Tensor = quiet_jvp(step, (self.h,), (tangent,))[1]
            return moved

    # --- the step itself, with a graph --------------------------------------------------------------------------

    @cached_property
    def _leaf(self) -> Tensor:
        return self.h.detach().requires_grad_()

    @cached_property
    def _ran(self) -> tuple[Any, Any]:
        with torch.enable_grad():
            before = self.tree.tree({**self.state, "h": self._leaf})
            output, state = run(self.model, self.weights, self.x, before, self.write)
        self.tree.check(state, self.batch)
        return output, state

    @property
    def output(self) -> Any:
        """The model's output beside the new state."""
        return self._ran[0]

    @cached_property
    def after(self) -> Tensors:
        """The new state, as rows."""
        return self.tree.rows(self._ran[1])

    @property
    def finite(self) -> Tensor:
        """(streams,): whether input, output and new state of the stream are finite."""
        return finite_rows((self.x, self._ran), self.batch)

    def depends_on(self) -> tuple[str, ...]:
        """Names of the parameters that the new state depends on. It must depend on the old state."""
        h, ends = self.after["h"], [self._leaf, *self.weights.values()]
        found = torch.autograd.grad(h.sum(), ends, allow_unused=True) if h.requires_grad else [None] * len(ends)
        if found[0] is None:
            raise InputError(
                "model: the state that forward(x, state) returns does not depend on the state that it is given. Use "
                "the state, without detaching it, or train the model as one without memory."
            )
        return tuple(name for name, grad in zip(self.weights, found[1:], strict=True) if grad is not None)

    def differentiated(self, loss_fn: LossFn, target: Any) -> tuple[Tensor, Tensors, Error | None, int]:
        """The mean loss, its exact gradients within the step, the error, and how many losses were not finite.

        `target` has a row for each of the streams that there are in all.
        """
        if self.index is not None:
            target = rows_of(target, self.index, self.streams)
        out, task = self.output, Task(self.model, loss_fn, (self.x,), target)
        with torch.enable_grad():
            losses = task.losses(out)
            if len(losses) != self.batch:
                raise InputError(f"loss_fn: expected one loss per stream, {self.batch}, found {len(losses)}.")
            fine = torch.isfinite(losses.detach())
            bad = int((~fine).sum())
            if bad == self.batch:
                return self.h.new_full((), float("nan")), {}, None, bad
            if bad:  # a NaN times zero is a NaN: the loss must not see those rows
                rows = fine.nonzero()[:, 0]
                losses = task.part(rows, self.batch).losses(rows_of(out, rows, self.batch))
            loss = losses.mean()
        if not loss.requires_grad:
            raise InputError("loss_fn: the loss depends neither on the model's parameters nor on its state.")
        single = isinstance(out, Tensor) and out.requires_grad and out.shape[:1] == (self.batch,)
        ends = [self._leaf, *self.weights.values(), *([out] if single else [])]
        found = torch.autograd.grad(loss, ends, retain_graph=True, allow_unused=True, materialize_grads=True)
        error = Error(found[0], found[-1].reshape(self.batch, -1).to(found[0]) if single else None)
        return loss.detach(), dict(zip(self.weights, found[1:], strict=False)), error, bad


def run(model: nn.Module, weights: Mapping[str, Tensor], x: Any, state: Any, write: bool = False) -> tuple[Any, Any]:
    """Call the model: (output, new state). Its buffers stay as they are unless it may `write` them."""
    buffers = {} if write else {name: buffer.clone() for name, buffer in model.named_buffers()}
    result = Task(model, torch.sub, (x, state), None).outputs({**buffers, **weights})  # no loss is asked for
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"model: forward(x, state) must return (output, state), found {type(result).__name__}.")
    return result


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns PyTorch's error about a model that it cannot vectorise into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        text, _, _ = str(error).partition("\n")
        if isinstance(error, GradguessError) or "out of memory" in str(error):
            raise
        if "randomness" in str(error):
            raise InputError(
                "The model draws random numbers (dropout): the influence cannot be carried through another draw than "
                "the step's own. Call model.eval(), or draw outside of the model, in loss_fn for instance."
            ) from error
        raise ForwardModeError(
            f"UORO carries a direction forwards, and PyTorch says: {text} Give your autograd.Function a jvp, or use "
            "another rule."
            if "jvp" in str(error)
            else f"The model cannot be vectorised over streams (torch.func.vmap): {text} An autograd.Function of your "
            "own needs setup_context and generate_vmap_rule = True; control flow must not depend on numbers; TBPTT "
            "and OneStep work without."
        ) from error
