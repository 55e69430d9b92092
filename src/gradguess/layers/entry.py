"""A line of the table of layers, and what its rules need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

Gate = Callable[[Tensor], Tensor]  # from the input of an elementwise function to its derivative there
GradientRule = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]  # (module, x, g) -> {parameter: gradient}
TangentRule = Callable[..., Tensor | None]  # (function, *arguments) -> the dual output, or None: use PyTorch's formula


@dataclass(frozen=True)
class Layer:
    """What is known of one kind of layer. Everything is optional.

    Attributes:
        modules: the module types that it covers.
        functions: the functions of PyTorch that these modules call; keys of `tangent`.
        gradient: `(module, x, g) -> {parameter: gradient}`, from the input and the cotangent of the output.
        holds_for: whether `gradient` holds for the settings of a module.
        tangent: the output with its tangent, for a dual input.
        always: whether `tangent` holds under autocast, and is the function's own where there is no tangent.
        written_out: the functions in smaller ones, which pass the rules themselves; None: not for these arguments.
        channels_first: the features of the output lie in its first dimension after the batch.
        is_matrix: the output is `module.weight @ x`, plus a constant.
    """

    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    gradient: GradientRule | None = None
    holds_for: Callable[[Any], bool] = lambda module: True
    tangent: TangentRule | None = None
    always: bool = False
    written_out: Callable[..., Any] | None = None
    channels_first: bool = False
    is_matrix: bool = False


def unpack(x: Any) -> tuple[Tensor, Tensor | None]:
    """Value and tangent of a dual number; no tangent for anything else."""
    if type(x) is not Tensor:
        return x, None
    p, t = fwAD.unpack_dual(x)
    if t is None or p.requires_grad or not torch.is_grad_enabled():
        return p, t
    return p.detach(), t  # a reverse graph that kept the view of `x` would keep the tangent


def is_constant(*others: Any) -> bool:
    """Whether none of these carries a tangent."""
    return all(
        other is None or type(other) is nn.Parameter or (type(other) is Tensor and unpack(other)[1] is None)
        for other in others
    )
