"""Gates: derivatives of the elementwise functions that follow a site (a ReLU's is the mask `M` of the paper, eq. (4)).

The function is read off the autograd node that PyTorch records for it. So it does not matter whether a model calls
`nn.ReLU()`, `F.relu`, `torch.relu` or the in-place form.

The tangents of the most common ones are PyTorch's own. They are written down here so that a reverse graph beside them
keeps values alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

from gradguess.layers.entry import Gate, Layer, TangentRule, unpack

_aten = torch.ops.aten


def mask(s: Tensor) -> Tensor:
    """The gate of a ReLU, written as floats at once: going over bool takes eight times as long on a CPU."""
    return torch.gt(s, 0, out=torch.empty_like(s, requires_grad=False))


def gate_of(node: Any) -> Gate | None:
    """The derivative of the elementwise function that an autograd node computes; None if it is not in the table."""
    make = _GATES.get(node.name())
    return None if make is None else make(node)


def _gate(backward: Callable[..., Tensor], *settings: str) -> Callable[[Any], Gate]:
    """From a node to its gate, by `backward(1, s, *settings)`, with the settings that the node has saved."""

    def of_node(node: Any) -> Gate:
        values = [getattr(node, f"_saved_{name}") for name in settings]
        return lambda s: backward(torch.ones_like(s), s, *values)

    return of_node


_leaky_relu = _gate(lambda g, s, slope: _aten.leaky_relu_backward(g, s, slope, False), "negative_slope")
_elu = _gate(lambda g, s, *scales: _aten.elu_backward(g, *scales, False, s), "alpha", "scale", "input_scale")
_GATES: dict[str, Callable[[Any], Gate]] = {  # where there are two of a kind, the second is the in-place form
    "ReluBackward0": lambda node: mask,
    "LeakyReluBackward0": _leaky_relu,
    "LeakyReluBackward1": _leaky_relu,
    "GeluBackward0": _gate(lambda g, s, kind: _aten.gelu_backward(g, s, approximate=kind), "approximate"),
    "TanhBackward0": _gate(lambda g, s: _aten.tanh_backward(g, torch.tanh(s))),
    "SigmoidBackward0": _gate(lambda g, s: _aten.sigmoid_backward(g, torch.sigmoid(s))),
    "SiluBackward0": _gate(_aten.silu_backward),
    "EluBackward0": _elu,
    "EluBackward1": _elu,
    "SoftplusBackward0": _gate(_aten.softplus_backward, "beta", "threshold"),
    "HardtanhBackward0": _gate(_aten.hardtanh_backward, "min_val", "max_val"),
    "MishBackward0": _gate(_aten.mish_backward),
    "HardswishBackward0": _gate(_aten.hardswish_backward),
}


def _tangent(slope: Callable[..., Tensor]) -> TangentRule:
    """The rule of `y = φ(x)`, from `slope(t, x, y)`, which multiplies `t` by the derivative of `φ`."""

    def elementwise_tangent(function: Any, x: Tensor, **options: Any) -> Tensor | None:
        p, t = unpack(x)
        if t is None or options.pop("inplace", False):
            return None
        y = function(p, **options)
        return fwAD.make_dual(y, slope(t, p.detach(), y.detach(), **options))

    return elementwise_tangent


_TANGENTS: dict[tuple[Callable[..., Any], ...], TangentRule] = {
    (F.relu, torch.relu, Tensor.relu): _tangent(lambda t, x, y: _aten.threshold_backward(t, y, 0)),
    (F.gelu,): _tangent(lambda t, x, y, **options: _aten.gelu_backward(t, x, **options)),
    (torch.tanh, Tensor.tanh): _tangent(lambda t, x, y: _aten.tanh_backward(t, y)),
    (F.silu,): _tangent(lambda t, x, y: _aten.silu_backward(t, x)),
}
LAYERS = tuple(Layer(functions=functions, tangent=rule, always=True) for functions, rule in _TANGENTS.items())
