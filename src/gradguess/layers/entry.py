"""A line of the table of layers, and what its rules need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._C._functorch import TransformType

Gate = Callable[[Tensor], Tensor]  # from the input of an elementwise function to its derivative there
GradientRule = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]  # (module, u, g) -> {parameter: gradient}
TangentRule = Callable[..., Tensor | None]  # (function, *arguments) -> the dual output, or None: use PyTorch's formula


@dataclass(frozen=True)
class Layer:
    """What is known of one kind of layer. Everything is optional.

    Attributes:
        modules: the module types that it covers.
        functions: the functions of PyTorch that these modules call; keys of `tangent`.
        gradient: `(module, u, g) -> {parameter: gradient}`, from what is read of the input and the cotangent of the
            output.
        reads: `(module, x) -> u`, what is read of the input.
        folds: whether, with a module's settings, the gradient is bilinear in rows of `u` and `g`, one row for each
            position, or the sum of `g`, "bias".
        holds_for: whether `gradient` holds for the settings of a module.
        tangent: the output with its tangent, for a dual input.
        always: whether `tangent` holds under autocast, and is the function's own where there is no tangent.
        tracked: `tangent` has an option `tracked`, with which other derivatives pass through the tangent.
        written_out: the functions in smaller ones, which pass the rules themselves; None: not for these arguments.
        channels_first: the features of the output lie in its first dimension after the batch.
        is_matrix: the output is `module.weight @ x`, plus a constant.
    """

    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    gradient: GradientRule | None = None
    reads: Callable[[Any, Tensor], Tensor] = lambda module, x: x
    folds: Callable[[Any], bool] = lambda module: False
    holds_for: Callable[[Any], bool] = lambda module: True
    tangent: TangentRule | None = None
    always: bool = False
    tracked: bool = False
    written_out: Callable[..., Any] | None = None
    channels_first: bool = False
    is_matrix: bool = False

    def of(self, module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """The gradients of the module's parameters."""
        assert self.gradient is not None
        x = x.detach().to(g.dtype) if x.is_floating_point() else x
        return self.gradient(module, self.reads(module, x), g)


def unpack(x: Any) -> tuple[Tensor, Tensor | None]:
    """Value and tangent of a dual number; no tangent for anything else."""
    if type(x) is not Tensor:
        return x, None
    p, t = fwAD.unpack_dual(x)
    if t is None or recorded(p) or not torch.is_grad_enabled():
        return p, t
    return p.detach(), t  # a reverse graph that kept the view of `x` would keep the tangent


def recorded(t: Tensor) -> bool:
    """Whether a graph holds the tensor, as far as it shows: not under `torch.func`, and not to the compiler."""
    return t.requires_grad or torch.compiler.is_dynamo_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(t)


def is_constant(*others: Any) -> bool:
    """Whether none of these carries a tangent."""
    return all(
        other is None or type(other) is nn.Parameter or (type(other) is Tensor and unpack(other)[1] is None)
        for other in others
    )


def rewired(function: Any, **globals_: Any) -> Any:
    """The function by its code, which sees these objects in the place of its global ones."""
    seen = {**function.__globals__, **globals_}
    return FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)


def transforms() -> tuple[TransformType, ...]:
    """The transforms of `torch.func` that are open, the outermost first; dual numbers by themselves are none."""
    return tuple(one.key() for one in torch._C._functorch.get_interpreter_stack() or ())


def is_opaque() -> bool:
    """Whether `grad` or `vmap` is open inside of a tangent, which does not show there."""
    last = torch._C._functorch.peek_interpreter_stack()
    return last is not None and fwAD._current_level >= 0 and last.key() != TransformType.Jvp


def is_differentiated(tracked: bool) -> bool:
    """Whether another `jvp` or `vmap` is open around the tangent; `grad` counts where tangents are `tracked`."""
    others = set(transforms()[:-1])
    return bool(others) and (tracked or others != {TransformType.Grad})


for _fixed in (transforms, is_opaque, is_differentiated):  # `torch.compiler.assume_constant_result` is slow to import
    vars(_fixed)["_dynamo_marked_constant"] = True
