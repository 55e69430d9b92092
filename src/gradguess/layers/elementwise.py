"""Gates: derivatives of the elementwise functions that follow a site (a ReLU's is the mask `M` of the paper).

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


def _leaky_relu(node: Any) -> Gate:
    slope = node._saved_negative_slope
    return lambda s: torch.where(s > 0, torch.ones_like(s), slope)


def _gelu(node: Any) -> Gate:
    approximate = node._saved_approximate
    return lambda s: _aten.gelu_backward(torch.ones_like(s), s, approximate=approximate)


def _sigmoid(s: Tensor) -> Tensor:
    p = torch.sigmoid(s)
    return p * (1 - p)


def _elu(node: Any) -> Gate:
    alpha, scale, input_scale = node._saved_alpha, node._saved_scale, node._saved_input_scale
    return lambda s: _aten.elu_backward(torch.ones_like(s), alpha, scale, input_scale, False, s)


def _softplus(node: Any) -> Gate:
    beta, threshold = node._saved_beta, node._saved_threshold
    return lambda s: _aten.softplus_backward(torch.ones_like(s), s, beta, threshold)


def _hardtanh(node: Any) -> Gate:
    low, high = node._saved_min_val, node._saved_max_val
    return lambda s: ((s > low) & (s < high)).to(s.dtype)


def _tangent(slope: Callable[..., Tensor]) -> TangentRule:
    """The rule of `y = φ(x)`, from `slope(t, x, y)`, which multiplies `t` by the derivative of `φ`."""

    def elementwise_tangent(function: Any, x: Tensor, **options: Any) -> Tensor | None:
        p, t = unpack(x)
        if t is None or options.pop("inplace", False):
            return None
        y = function(p, **options)
        return fwAD.make_dual(y, slope(t, p.detach(), y.detach(), **options))

    return elementwise_tangent


def _always(gate: Gate) -> Callable[[Any], Gate]:
    """For functions without settings."""
    return lambda node: gate


LAYERS = (
    Layer(
        functions=(F.relu, torch.relu, Tensor.relu),
        nodes=("ReluBackward0",),
        tangent=_tangent(lambda t, x, y: _aten.threshold_backward(t, y, 0)),
        always=True,
        gate=_always(mask),
    ),
    Layer(nodes=("LeakyReluBackward0", "LeakyReluBackward1"), gate=_leaky_relu),  # the second is the in-place form
    Layer(
        functions=(F.gelu,),
        nodes=("GeluBackward0",),
        tangent=_tangent(lambda t, x, y, **options: _aten.gelu_backward(t, x, **options)),
        always=True,
        gate=_gelu,
    ),
    Layer(
        functions=(torch.tanh, Tensor.tanh),
        nodes=("TanhBackward0",),
        tangent=_tangent(lambda t, x, y: _aten.tanh_backward(t, y)),
        always=True,
        gate=_always(lambda s: 1 - torch.tanh(s).square()),
    ),
    Layer(nodes=("SigmoidBackward0",), gate=_always(_sigmoid)),
    Layer(
        functions=(F.silu,),
        nodes=("SiluBackward0",),
        tangent=_tangent(lambda t, x, y: _aten.silu_backward(t, x)),
        always=True,
        gate=_always(lambda s: _aten.silu_backward(torch.ones_like(s), s)),
    ),
    Layer(nodes=("EluBackward0", "EluBackward1"), gate=_elu),
    Layer(nodes=("SoftplusBackward0",), gate=_softplus),
    Layer(nodes=("HardtanhBackward0",), gate=_hardtanh),
    Layer(nodes=("MishBackward0",), gate=_always(lambda s: _aten.mish_backward(torch.ones_like(s), s))),
    Layer(nodes=("HardswishBackward0",), gate=_always(lambda s: _aten.hardswish_backward(torch.ones_like(s), s))),
)
