"""The state of a recurrent model, a tree of tensors, as one vector for each stream, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from gradguess.errors import InputError
from gradguess.model.task import tensors


@dataclass(frozen=True)
class StateTree:
    """The structure of a state: the tree, and the shape of each leaf for one stream with its dtype.

    Floating-point leaves make up the vector `h`, in order. Others, such as a counter, are carried beside it.
    """

    spec: TreeSpec
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(state: Any, streams: int) -> StateTree:
        """The structure of the first state."""
        leaves, spec = tree_flatten(state)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (streams,):
                raise InputError(
                    f"state: expected tensors with one row per stream, {streams}, found {_described(leaf)}."
                )
            if leaf.is_complex():
                raise InputError("state: expected real tensors, found a complex one. Use torch.view_as_real on it.")
        if not tensors(leaves):
            raise InputError("state: expected at least one floating-point tensor, found none: nothing can be learned.")
        return StateTree(spec, tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves))

    def check(self, state: Any, batch: int) -> None:
        """Refuses a state of another structure."""
        leaves, spec = tree_flatten(state)
        expected = [((batch, *shape), dtype) for shape, dtype in self.kinds]
        found = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
        if spec != self.spec or found != expected:
            raise InputError(
                f"The state changed its shape or dtype: expected {expected}, found {found}. forward(x, state) must "
                "return a state that looks like the first one and the one it was given, with one row per stream."
            )

    def vector(self, state: Any) -> Tensor:
        """`h`, (batch, n)."""
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in tensors(state)], 1)

    def rows(self, state: Any) -> dict[str, Tensor]:
        """The state by name: "h" is the vector, "others/0" and so on are the leaves that are not in it."""
        others = [leaf for leaf in tree_leaves(state) if not leaf.is_floating_point()]
        return {"h": self.vector(state), **{f"others/{i}": leaf for i, leaf in enumerate(others)}}

    def tree(self, rows: Mapping[str, Tensor]) -> Any:
        """The state with these rows. It is a copy: a model may write into the state that it is given."""
        h = rows["h"]
        parts = iter(h.split([prod(shape) for shape, dtype in self.kinds if dtype.is_floating_point], 1))
        others = (rows[f"others/{i}"] for i in range(len(rows) - 1))
        leaves = [
            (next(parts).reshape(len(h), *shape) if dtype.is_floating_point else next(others)).to(dtype, copy=True)
            for shape, dtype in self.kinds
        ]
        return tree_unflatten(leaves, self.spec)


def batch_of(x: Any) -> int:
    """The number of streams: rows of every tensor of the input."""
    leaves = tree_leaves(x)
    counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        found = [_described(leaf) for leaf in leaves] or "nothing"
        raise InputError(f"x: expected tensors with one row per stream, shape (streams, ...), found {found}.")
    return int(counts.pop())


def finite_rows(tree: Any, batch: int) -> Tensor:
    """(batch,): whether every number in the row is finite."""
    rows = [leaf.detach() for leaf in tensors(tree) if leaf.shape[:1] == (batch,)]
    return torch.stack([torch.isfinite(row)[:, None].flatten(1).all(1) for row in rows]).all(0)


def _described(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
