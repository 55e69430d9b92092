"""The table of layers. To add a layer: write its file, and add its line here."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradguess.layers import (
    arithmetic,
    attention,
    convolution,
    cross_entropy,
    elementwise,
    embedding,
    linear,
    norms,
    recurrence,
)
from gradguess.layers.entry import Gate, GradientRule, Layer, TangentRule

LAYERS: tuple[Layer, ...] = (
    linear.LAYER,
    linear.ADDMM,
    convolution.LAYER,
    embedding.LAYER,
    *norms.LAYERS,
    *elementwise.LAYERS,
    *attention.LAYERS,
    *recurrence.LAYERS,
    arithmetic.LAYER,
    *cross_entropy.LAYERS,
)

_BY_MODULE = {module: layer for layer in LAYERS for module in layer.modules}
_BY_NODE = {node: layer for layer in LAYERS for node in layer.nodes}
TANGENTS: dict[Any, TangentRule] = {
    function: layer.tangent for layer in LAYERS if layer.tangent is not None for function in layer.functions
}
ALWAYS = {function: TANGENTS[function] for layer in LAYERS if layer.always for function in layer.functions}
WRITTEN_OUT = {
    function: layer.written_out for layer in LAYERS if layer.written_out is not None for function in layer.functions
}
CHANNELS_FIRST = tuple(module for layer in LAYERS if layer.channels_first for module in layer.modules)


def add(layer: Layer) -> None:
    """Teach the table the modules of a layer of your own, from then on."""
    _BY_MODULE.update(dict.fromkeys(layer.modules, layer))


def is_matrix(module: nn.Module) -> bool:
    """Is the output of the module `module.weight @ x`, plus a constant?"""
    layer = _BY_MODULE.get(type(module))
    return layer is not None and layer.is_matrix


def gradient_of(module: nn.Module) -> GradientRule | None:
    """The closed form of a module's parameter gradient, if there is one. Exact types only: a subclass may differ."""
    layer = _BY_MODULE.get(type(module))
    return layer.gradient if layer is not None and layer.holds_for(module) else None


def gate_of(node: Any) -> Gate | None:
    """The derivative of the elementwise function that an autograd node computes, if it is one of the table's."""
    layer = _BY_NODE.get(node.name())
    return None if layer is None or layer.gate is None else layer.gate(node)
