"""What passes over a traced graph share: new nodes that know their shapes, and sight through changes of shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.fx.passes.shape_prop import _extract_tensor_metadata

Add = Callable[..., fx.Node]  # puts a node into the graph
aten = torch.ops.aten
_SAME_ORDER = (  # where the result has as many numbers, they are the same in the same order
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten._to_copy.default),
)


def small_on(device: torch.device) -> int:
    """Multiplications of a product that takes no longer than it takes to start a few others."""
    return 2**18 if device.type == "cpu" else 2**25


def large_on(device: torch.device) -> int:
    """Numbers of a tensor up to which two products that share their matrix gain from being one; on a CPU none do."""
    return 0 if device.type == "cpu" else 2**20


def turns_channels(device: torch.device) -> bool:
    """Is a convolution faster with the channels last, where they come first at a site? A CPU takes longer to turn
    them than it gains.
    """
    return device.type != "cpu"


def described(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph, with the shapes of the tensors that it holds itself."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            node.meta["tensor_meta"] = _extract_tensor_metadata(getattr(graph, node.target))
    return graph


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and hasattr(node.meta.get("tensor_meta"), "shape")


def shape_of(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["tensor_meta"].shape
    return shape


def dtype_of(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["tensor_meta"].dtype
    return dtype


def is_fine(dtype: torch.dtype) -> bool:
    """Does another order of sums change no more than the last digits? Half precision would show it."""
    return dtype in (torch.float32, torch.float64)


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node, with the shape of what it makes."""
    node = graph.call_function(target, args, kwargs)
    given, named = map_arg((args, kwargs), lambda known: _without_numbers(known.meta["tensor_meta"]))
    node.meta["tensor_meta"] = _about(target(*given, **named))
    return node


def _about(made: Any) -> Any:
    if isinstance(made, tuple | list):
        return tuple(map(_about, made))
    return None if made is None else _extract_tensor_metadata(made)


def _without_numbers(about: Any) -> Any:
    if not hasattr(about, "shape"):
        return None if about is None else tuple(map(_without_numbers, about))
    return torch.empty_strided(about.shape, about.stride, dtype=about.dtype, device="meta")


def layout_of(node: fx.Node) -> torch.memory_format:
    """How a tensor lies in memory, as what reads it expects."""
    return node.meta["tensor_meta"].memory_format or torch.contiguous_format


def laid_out(add: Add, node: Any, layout: torch.memory_format = torch.contiguous_format) -> fx.Node:
    """The same tensor in this layout; by default in the order of its dimensions."""
    return add(aten.clone.default, node, memory_format=layout)


def before(node: Any) -> fx.Node | None:
    """The node whose numbers `node` has in the same order, in another shape, or rounded to another type."""
    if not is_tensor(node):
        return None
    if node.target is aten.select_scatter.default:  # all of what is written over, if it is as large
        below = node.args[1]
    elif node.target in _SAME_ORDER:
        below = node.args[0]
    else:
        return None
    return below if is_tensor(below) and shape_of(below).numel() == shape_of(node).numel() else None


def transposed(node: Any) -> fx.Node | None:
    """What `node` is the transpose of; None where it is none."""
    below: fx.Node | None = node.args[0] if node.target is aten.t.default else None
    return below
