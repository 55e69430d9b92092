"""One step of every stream, `h_{t-1} -> h_t`, and products with its two Jacobians."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.errors import ForwardModeError, GradguessError, InputError
from gradguess.model.task import LossFn, Task
from gradguess.online.cut_products import CutProducts
from gradguess.online.state_tree import StateTree
from gradguess.passes.forward_mode import quiet_jvp

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Transition:
    """The step from `h_{t-1}` to `h_t` with the weights of now.

    `J = ∂h_t/∂h_{t-1}` is (n, n) and `F = ∂h_t/∂θ` is (n, p), for each stream. Neither is ever needed whole: rules ask
    for products from the left, all of them in one vectorised reverse pass.

    Attributes:
        model: of the user.
        tree: what the state looks like.
        parameters: those that the state depends on, by name, detached.
        h: the state before the step, (batch, n).
        others: the leaves of the state that are not floating-point.
        x: the input of the step.
        generator: for rules that draw.
        count: steps that were made before this one.
    """

    model: nn.Module
    tree: StateTree
    parameters: Mapping[str, Tensor]
    h: Tensor
    others: tuple[Tensor, ...]
    x: Any
    generator: torch.Generator
    count: int

    @property
    def batch(self) -> int:
        return self.h.shape[0]

    @property
    def width(self) -> int:
        """`n`."""
        return self.h.shape[1]

    def vjps(self, cotangents: Tensor, cut: bool = False) -> tuple[Tensor, Tensors]:
        """`c J` and `c F` for each cotangent `c`.

        Args:
            cotangents: (m, n), the same for all streams, or (batch, m, n).
            cut: take the state that enters a product with weights as a constant.

        Returns:
            (batch, m, n), and for each parameter (batch, m, its size).
        """

        def of_one(h: Tensor, others: tuple[Tensor, ...], x: Any, c: Tensor) -> tuple[Tensor, Tensors]:
            made: Any = torch.func.vjp(lambda p, h: self._one(p, h, others, x, cut), dict(self.parameters), h)
            to_parameters, to_state = torch.func.vmap(made[1])(c)
            return to_state, {name: grad.reshape(len(grad), -1).to(h.dtype) for name, grad in to_parameters.items()}

        shared = None if cotangents.dim() == 2 else 0
        with explained():
            return torch.func.vmap(of_one, in_dims=(0, 0, 0, shared))(self.h, self.others, self.x, cotangents)

    def jacobian(self) -> Tensor:
        """`J`, (batch, n, n)."""

        def of_one(h: Tensor, others: tuple[Tensor, ...], x: Any) -> Tensor:
            made: Any = torch.func.vjp(lambda h: self._one(self.parameters, h, others, x), h)
            return torch.func.vmap(made[1])(torch.eye(self.width, dtype=h.dtype, device=h.device))[0]

        with explained():
            return torch.func.vmap(of_one)(self.h, self.others, self.x)

    def vjp(self, cotangent: Tensor) -> tuple[Tensor, Tensors]:
        """`c J` for one cotangent `c` (batch, n) of each stream, and `c F` summed over the streams."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        h = self.h.detach().requires_grad_()
        with torch.enable_grad():
            after = self.tree.vector(run(self.model, parameters, self.x, self.tree.tree(h, self.others))[1])
        wanted = [h, *parameters.values()]
        to_state, *grads = torch.autograd.grad(after, wanted, cotangent, allow_unused=True, materialize_grads=True)
        return to_state, dict(zip(parameters, grads, strict=True))

    def jvp(self, tangent: Tensor) -> Tensor:
        """`J s` for one direction `s` (batch, n) of each stream."""

        def step(h: Tensor) -> Tensor:
            return self.tree.vector(run(self.model, self.parameters, self.x, self.tree.tree(h, self.others))[1])

        with explained():
            moved: Tensor = quiet_jvp(step, (self.h,), (tangent,))[1]
            return moved

    def output(self) -> Any:
        """What the model returns beside the new state."""
        with torch.no_grad():
            return run(self.model, self.parameters, self.x, self.tree.tree(self.h, self.others))[0]

    def _one(
        self, parameters: Mapping[str, Tensor], h: Tensor, others: tuple[Tensor, ...], x: Any, cut: bool = False
    ) -> Tensor:
        """The new state of one stream: the model sees a batch of one."""
        state = self.tree.tree(h[None], [leaf[None] for leaf in others])
        x = tree_map_only(Tensor, lambda leaf: leaf[None], x)
        with CutProducts((x, state)) if cut else contextlib.nullcontext():
            after = run(self.model, parameters, x, state)[1]
        return self.tree.vector(after)[0]


def run(model: nn.Module, parameters: Mapping[str, Tensor], x: Any, state: Any, write: bool = False) -> tuple[Any, Any]:
    """Call the model: (output, new state). Its buffers stay as they are unless it may `write` them."""
    buffers = {} if write else {name: buffer.clone() for name, buffer in model.named_buffers()}
    result = Task(model, _no_loss, (x, state), None).outputs({**buffers, **parameters})
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"model: forward(x, state) must return (output, state), found {type(result).__name__}.")
    return result


def losses_of(model: nn.Module, loss_fn: LossFn, x: Any, output: Any, target: Any, batch: int) -> Tensor:
    """One loss per stream."""
    losses = Task(model, loss_fn, (x,), target).losses(output)
    if losses.shape[0] != batch:
        raise InputError(f"loss_fn: expected one loss per stream, {batch}, found {losses.shape[0]}.")
    return losses


def _no_loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("a transition has no loss")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what PyTorch says about a model that it cannot vectorise into a sentence that says what to do."""
    try:
        yield
    except GradguessError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "out of memory" in text:
            raise
        if "randomness" in text:
            raise InputError(
                "The model draws random numbers (dropout): the influence cannot be carried through another draw than "
                "the step's own. Call model.eval(), or draw outside of the model, in loss_fn for instance."
            ) from error
        if "jvp" in text:
            raise ForwardModeError(
                f"UORO carries a direction forwards, and PyTorch says: {text.splitlines()[0]} Give your "
                "autograd.Function a jvp, or use another rule."
            ) from error
        raise ForwardModeError(
            "The model cannot be vectorised over streams (torch.func.vmap): "
            f"{text.splitlines()[0]} An autograd.Function of your own needs setup_context and "
            "generate_vmap_rule = True; control flow must not depend on numbers; TBPTT and OneStep work without."
        ) from error
