"""The state of a recurrent model, a tree of tensors, as one vector for each stream, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from gradguess.errors import InputError


@dataclass(frozen=True)
class StateTree:
    """What a state looks like: the tree, the shape of each leaf for one stream, and its dtype.

    Floating-point leaves make up the vector `h`, in order. Others, such as a counter, are carried beside it.
    """

    spec: TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(state: Any) -> StateTree:
        leaves, spec = tree_flatten(state)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise InputError(f"state: expected tensors with one row per stream, found {_described(leaf)}.")
            if leaf.is_complex():
                raise InputError("state: expected real tensors, found a complex one. Use torch.view_as_real on it.")
        tree = StateTree(spec, tuple(tuple(leaf.shape[1:]) for leaf in leaves), tuple(leaf.dtype for leaf in leaves))
        if not tree.width:
            raise InputError("state: expected at least one floating-point tensor, found none: nothing can be learned.")
        return tree

    @property
    def width(self) -> int:
        """`n`, the length of the vector."""
        return sum(
            prod(shape) for shape, dtype in zip(self.shapes, self.dtypes, strict=True) if dtype.is_floating_point
        )

    def check(self, state: Any, batch: int) -> None:
        """Refuse a state that does not look like this one."""
        leaves, spec = tree_flatten(state)
        expected = [(batch, *shape) for shape in self.shapes]
        found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        dtypes = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        if spec != self.spec or found != expected:
            raise InputError(
                f"The state changed its shape: expected {expected}, found {found}. forward(x, state) must return a "
                "state that looks like the one it was given, with one row per stream."
            )
        if dtypes != list(self.dtypes):
            raise InputError(
                f"The state changed its dtype: expected {list(self.dtypes)}, found {dtypes}. Let initial_state return "
                "the dtypes that forward does, or let forward cast back."
            )

    def vector(self, state: Any) -> Tensor:
        """`h`, (batch, n)."""
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in tree_leaves(state) if leaf.is_floating_point()], 1)

    def rows(self, state: Any) -> dict[str, Tensor]:
        """The state by name: "h" is the vector, "others/0" and so on are the leaves that are not in it."""
        others = [leaf for leaf in tree_leaves(state) if not leaf.is_floating_point()]
        return {"h": self.vector(state), **{f"others/{i}": leaf for i, leaf in enumerate(others)}}

    def tree(self, rows: Mapping[str, Tensor]) -> Any:
        """The state with these rows. It is a copy: a model may write into the state that it is given."""
        leaves, start, h, others = [], 0, rows["h"], count()
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype.is_floating_point:
                leaf = h[:, start : start + prod(shape)].reshape(len(h), *shape)
                start += prod(shape)
            else:
                leaf = rows[f"others/{next(others)}"]
            leaves.append(leaf.to(dtype, copy=True))
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
    found = None
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.shape[0] == batch:
            row = torch.isfinite(leaf.detach()).flatten(1).all(1) if leaf.dim() > 1 else torch.isfinite(leaf.detach())
            found = row if found is None else found & row
    return torch.ones(batch, dtype=torch.bool) if found is None else found


def _described(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
