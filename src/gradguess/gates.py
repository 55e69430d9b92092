"""Gates: the derivative of the elementwise function that follows a site (a ReLU's mask, `M` in the paper).

The function is read off the autograd node that PyTorch records for it, so it does not matter whether the model
calls `nn.ReLU()`, `F.relu`, `torch.relu` or the in-place form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gate = Callable[[Tensor], Tensor]

_aten = torch.ops.aten


def mask(s: Tensor) -> Tensor:
    """The gate of a ReLU, written as floats at once: going over bool takes eight times as long on a CPU."""
    return torch.gt(s, 0, out=torch.empty_like(s, requires_grad=False))


def _relu(node: Any) -> Gate:
    return mask


def _leaky_relu(node: Any) -> Gate:
    slope = node._saved_negative_slope
    return lambda s: torch.where(s > 0, torch.ones_like(s), slope)


def _gelu(node: Any) -> Gate:
    approximate = node._saved_approximate
    return lambda s: _aten.gelu_backward(torch.ones_like(s), s, approximate=approximate)


def _tanh(node: Any) -> Gate:
    return lambda s: 1 - torch.tanh(s).square()


def _sigmoid(node: Any) -> Gate:
    def gate(s: Tensor) -> Tensor:
        p = torch.sigmoid(s)
        return p * (1 - p)

    return gate


def _silu(node: Any) -> Gate:
    return lambda s: _aten.silu_backward(torch.ones_like(s), s)


def _elu(node: Any) -> Gate:
    alpha, scale, input_scale = node._saved_alpha, node._saved_scale, node._saved_input_scale
    return lambda s: _aten.elu_backward(torch.ones_like(s), alpha, scale, input_scale, False, s)


def _softplus(node: Any) -> Gate:
    beta, threshold = node._saved_beta, node._saved_threshold
    return lambda s: _aten.softplus_backward(torch.ones_like(s), s, beta, threshold)


def _hardtanh(node: Any) -> Gate:
    low, high = node._saved_min_val, node._saved_max_val
    return lambda s: ((s > low) & (s < high)).to(s.dtype)


def _mish(node: Any) -> Gate:
    return lambda s: _aten.mish_backward(torch.ones_like(s), s)


def _hardswish(node: Any) -> Gate:
    return lambda s: _aten.hardswish_backward(torch.ones_like(s), s)


_BY_NODE: dict[str, Callable[[Any], Gate]] = {
    "ReluBackward0": _relu,
    "LeakyReluBackward0": _leaky_relu,
    "LeakyReluBackward1": _leaky_relu,  # in place
    "GeluBackward0": _gelu,
    "TanhBackward0": _tanh,
    "SigmoidBackward0": _sigmoid,
    "SiluBackward0": _silu,
    "EluBackward0": _elu,
    "EluBackward1": _elu,  # in place
    "SoftplusBackward0": _softplus,
    "HardtanhBackward0": _hardtanh,
    "MishBackward0": _mish,
    "HardswishBackward0": _hardswish,
}


def gate_of(node: Any) -> Gate | None:
    """The derivative of the elementwise function that `node` (an autograd node) computes, if it is one."""
    make = _BY_NODE.get(node.name())
    return None if make is None else make(node)
