"""What a unit does by itself: no gradient passes through a product of state or input with weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.errors import InputError


def _functions(names: str) -> set[Any]:
    """Functions and methods of PyTorch with these names."""
    return {
        getattr(place, name) for place in (torch, Tensor, functional) for name in names.split() if hasattr(place, name)
    }


_SUMS = _functions("addmm baddbmm addmv")  # a + b c
_PRODUCTS = _SUMS | _functions(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv inner einsum tensordot conv1d conv2d conv3d"
)
_FUSED = _functions("rnn_tanh rnn_relu gru lstm rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell")


class CutProducts(TorchFunctionMode):
    """While open, what enters a product with weights is taken as a constant.

    What depends on the state or the input is followed from call to call. All else is a weight.

    Args:
        start: the state and the input, a tree.
    """

    def __init__(self, start: Any) -> None:
        super().__init__()
        self._moving = {id(leaf): leaf for leaf in tree_leaves(start) if isinstance(leaf, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(id(leaf) in self._moving for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func in _FUSED:
            raise InputError(
                f"{func.__name__} hides its products with weights, which EProp and RFLO must see. Put the cell into "
                "gg.online.Recurrent, or write its formula out."
            )
        if func in _PRODUCTS:
            added = args[:1] if func in _SUMS else ()
            args, kwargs = tree_map_only(Tensor, self._held, (args[len(added) :], kwargs))
            args = (*added, *args)
        result = func(*args, **kwargs)
        self._moving |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _held(self, value: Tensor) -> Tensor:
        return value.detach() if id(value) in self._moving else value
