"""Derivatives of what a unit does by itself: none passes through a product of state or input with weights."""

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
    places = (torch, Tensor, functional, torch.linalg)
    return {getattr(place, name) for place in places for name in names.split() if hasattr(place, name)}


_ADDING = _functions("addmm baddbmm addmv addbmm")  # a + b c
_FUSED = _functions(
    "rnn_tanh rnn_relu gru lstm rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell multi_head_attention_forward"
)
_WRITE = _functions("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__")  # besides names with an underscore
_NAMES = {
    "product": "addmm baddbmm addmv addbmm linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv inner dot vdot "
    "vecdot tensordot multi_dot chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d cosine_similarity cdist scaled_dot_product_attention einsum",
    "times": "mul multiply __mul__ __rmul__ mul_ multiply_ __imul__ div divide true_divide __truediv__ __rtruediv__ "
    "div_ divide_ true_divide_ __itruediv__ addcmul addcmul_ addcdiv addcdiv_ lerp lerp_",
    "sum": "sum nansum mean nanmean cumsum sum_to_size logsumexp prod norm vector_norm var std",
}
_KINDS = {function: kind for kind, names in _NAMES.items() for function in _functions(names)}


def _kind(func: Any, args: Any) -> str | None:
    """Whether a function multiplies and sums ("product"), multiplies number by number ("times") or sums ("sum")."""
    if func is torch.einsum and isinstance(args[0], str) and "->" in args[0]:
        terms, _, left = args[0].partition("->")
        summed = set(terms) - set(left) - set(", .")
        return "times" if not summed else "product" if "," in terms else "sum"
    return _KINDS.get(func)


class CutProducts(TorchFunctionMode):
    """While open, what enters a product with weights is taken as a constant.

    Tensors that depend on the state or the input are followed from call to call; all others are weights. A product may
    also be written as a multiplication by weights, number by number, and a sum of the results. So each multiplication
    makes a twin of its result, in which the factor was a constant, and so does what is computed from that; sums take
    the twins. A sum that is written as additions, term by term, is not seen.

    Args:
        start: the state and the input, a tree.
    """

    def __init__(self, start: Any) -> None:
        super().__init__()
        self._moving = {id(leaf): leaf for leaf in tree_leaves(start) if isinstance(leaf, Tensor)}
        self._twins: dict[int, Tensor] = {}  # of some that move

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(id(leaf) in self._moving for leaf in given):
            return func(*args, **kwargs)
        if func is Tensor.__iter__:  # `for row in state`
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if func in _FUSED:
            raise InputError(
                f"{func.__name__} hides its products with weights, which EProp and RFLO must see. Put the cell into "
                "gg.online.Recurrent, or write its formula out."
            )
        kind, twin = _kind(func, args), None
        if kind == "product":
            added = args[:1] if func in _ADDING else ()
            args, kwargs = tree_map_only(Tensor, self._as_constant, (args[len(added) :], kwargs))
            args = (*added, *args)
        elif kind == "sum":
            args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
        elif kind == "times" and any(leaf.dim() and id(leaf) not in self._moving for leaf in given):
            twin = self._made(func, *tree_map_only(Tensor, self._as_constant, (args, kwargs)))
        elif any(id(leaf) in self._twins for leaf in given):
            twin = self._made(func, *tree_map_only(Tensor, self._twin, (args, kwargs)))
        result = func(*args, **kwargs)
        leaves = _tensors(result, args)
        self._moving |= {id(leaf): leaf for leaf in leaves}
        if twin is not None:
            self._twins |= {id(leaf): other for leaf, other in zip(leaves, twin, strict=True)}
        return result

    def _made(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The twins of a call's results. A call that writes to its first argument gets a copy, or the twin itself."""
        name = getattr(func, "__name__", "")
        writes = func in _WRITE or (name.endswith("_") and not name.endswith("__"))
        if writes and all(args[0] is not twin for twin in self._twins.values()):
            args = (args[0].clone(), *args[1:])
        return _tensors(func(*args, **kwargs), args)

    def _as_constant(self, value: Tensor) -> Tensor:
        return value.detach() if id(value) in self._moving else value

    def _twin(self, value: Tensor) -> Tensor:
        return self._twins.get(id(value), value)


def _tensors(result: Any, args: Any) -> list[Tensor]:
    """The tensors that a call made, or wrote to."""
    return [leaf for leaf in tree_leaves(args[0] if result is None else result) if isinstance(leaf, Tensor)]
