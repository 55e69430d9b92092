"""The table of layers. To add a layer: write its file, and add its line here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradguess.layers import arithmetic, convolution, cross_entropy, elementwise, embedding, linear, norms
from gradguess.layers.entry import Gate, Layer, TangentRule

LAYERS: tuple[Layer, ...] = (
    linear.LAYER,
    convolution.LAYER,
    embedding.LAYER,
    *norms.LAYERS,
    *elementwise.LAYERS,
    arithmetic.LAYER,
    cross_entropy.LAYER,
)

_BY_MODULE = {module: layer for layer in LAYERS for module in layer.modules}
_BY_NODE = {node: layer for layer in LAYERS for node in layer.nodes}
TANGENTS: dict[Any, TangentRule] = {
    function: layer.tangent for layer in LAYERS if layer.tangent is not None for function in layer.functions
}
CHANNELS_FIRST = tuple(module for layer in LAYERS if layer.channels_first for module in layer.modules)


def has_closed_gradient(module: nn.Module) -> bool:
    """Does the table know the parameter gradient of this module? Exact types only: a subclass may differ."""
    layer = _BY_MODULE.get(type(module))
    return layer is not None and layer.gradient is not None and layer.holds_for(module)


def parameter_gradients(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Gradients of the module's own parameters, by name, from its input `x` and the cotangent `g` of its output."""
    gradient = _BY_MODULE[type(module)].gradient
    assert gradient is not None
    dtype = next(parameter.dtype for parameter in module._parameters.values() if parameter is not None)
    return gradient(module, x.to(dtype) if x.is_floating_point() else x, g.to(dtype))


def gate_of(node: Any) -> Gate | None:
    """The derivative of the elementwise function that an autograd node computes, if it is one of the table's."""
    layer = _BY_NODE.get(node.name())
    return None if layer is None or layer.gate is None else layer.gate(node)
