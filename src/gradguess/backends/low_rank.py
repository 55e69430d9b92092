"""Products with a guess of low rank, in the order that is cheaper.

The guess of W⊥ at a site without a gate is `Y = Z Vᵀ`: `k` numbers for each sample, times a basis that the batch
shares. What is linear in `Y` and treats each sample alike can be done to the `k` directions instead of the samples:
`(Z Vᵀ) M = Z (Vᵀ M)` below the site, and `(Z Vᵀ)ᵀ H = V (Zᵀ H)` for its weights. So can it to any other product whose
inner dimension is small; its rows are then called samples here, whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

from torch import fx

from gradguess.backends.rewriting import (
    Add,
    aten,
    before,
    call,
    dtype_of,
    is_fine,
    is_tensor,
    laid_out,
    layout_of,
    shape_of,
    transposed,
)

GAIN = 2  # a rank is low where it saves this much


@dataclass(frozen=True)
class _Product:
    """A tensor as `diag(scales) Z R`, one row per sample."""

    Z: fx.Node  # (batch, k)
    R: fx.Node  # (k, numbers of a sample)
    small: int  # multiplications of products that are left as they are
    scales: tuple[Any, ...] = ()  # numbers, and nodes with one number for each sample

    @property
    def batch(self) -> int:
        return shape_of(self.Z)[0]

    @property
    def k(self) -> int:
        return shape_of(self.Z)[1]

    def pays(self, inner: int, work: int) -> bool:
        """Is it faster to go by `k` directions, where sums of `inner` products are `work` multiplications in all?"""
        return GAIN * self.k * (self.batch + inner) <= self.batch * inner and work > self.small

    def in_rows_of(self, width: int) -> bool:
        """Does no row of `width` numbers lie in two samples?"""
        return width > 0 and shape_of(self.R)[1] % width == 0

    def scaled(self, add: Add) -> fx.Node:
        """`diag(scales) Z`."""
        Z = self.Z
        for scale in self.scales:
            by = add(aten.reshape.default, scale, [-1, 1]) if isinstance(scale, fx.Node) else scale
            Z = add(aten.mul.Tensor, Z, by)
        return Z


def in_cheaper_order(graph: fx.GraphModule, small: int) -> fx.GraphModule:
    """The same graph, with products of more than `small` multiplications that a low rank makes cheaper made by it."""
    low: dict[fx.Node, _Product] = {}
    for node in list(graph.graph.nodes):
        if (rewrite := _REWRITES.get(node.target)) is not None:
            with graph.graph.inserting_before(node):
                rewrite(partial(call, graph.graph), node, low)
        if node.users and (found := _low_rank(node, low, small)) is not None:
            low[node] = found
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.target is aten.sum.dim_IntList and node.args[0] in low:
            with graph.graph.inserting_before(node):
                _sum(partial(call, graph.graph), node, low[node.args[0]])
    graph.graph.eliminate_dead_code()
    return graph


def _low_rank(node: fx.Node, low: dict[fx.Node, _Product], small: int) -> _Product | None:
    """How the node is a product, where it is one or follows from one."""
    given: Any = node.args
    if node.target is aten.mm.default:
        Z, R = given
        (batch, k), n = shape_of(Z), shape_of(R)[1]
        return _Product(Z, R, small) if 0 < GAIN * k <= min(batch, n) and is_fine(dtype_of(Z)) else None
    if (below := before(node)) is not None:
        return low.get(below) if dtype_of(below) == dtype_of(node) else None
    if node.target is aten.mul.Tensor:
        for product, scale in (given, given[::-1]):
            if (known := low.get(product)) is not None and _is_per_sample(scale, product, known.batch):
                return replace(known, scales=(*known.scales, scale))
    return None


def _is_per_sample(scale: Any, product: Any, batch: int) -> bool:
    """Is it a Python number, or a tensor with one number for each sample?"""
    if not is_tensor(scale):
        return isinstance(scale, int | float)
    if dtype_of(scale) != dtype_of(product):
        return False
    full = shape_of(product)
    own = (1,) * (len(full) - len(shape_of(scale))) + tuple(shape_of(scale))
    varies = max((dim + 1 for dim, size in enumerate(own) if size > 1), default=0)
    return len(own) == len(full) and own[:varies] == full[:varies] and full[:varies].numel() == batch


def _mm(add: Add, node: fx.Node, low: dict[fx.Node, _Product]) -> None:
    """`Y M`, `Yᵀ H` and `Hᵀ Y`."""
    given: Any = node.args
    left, right = given
    turned, work = transposed(left), shape_of(left).numel() * shape_of(right)[1]
    if (Y := low.get(left)) is not None:
        inner, n = shape_of(right)
        if Y.in_rows_of(inner) and Y.pays(inner, work):
            rows = add(aten.reshape.default, Y.R, [-1, inner])
            columns = add(aten.reshape.default, add(aten.mm.default, rows, right), [Y.k, -1])
            made = add(aten.mm.default, Y.scaled(add), columns)
            node.replace_all_uses_with(add(aten.reshape.default, made, [-1, n]))
    elif turned is not None and (Y := low.get(turned)) is not None:
        width = shape_of(left)[0]
        if Y.in_rows_of(width) and Y.pays(width, work):
            rows, sums = _outer(add, Y, right, width)
            node.replace_all_uses_with(add(aten.mm.default, add(aten.t.default, rows), sums))
    elif turned is not None and (Y := low.get(right)) is not None:
        width = shape_of(right)[1]
        if Y.in_rows_of(width) and Y.pays(width, work):
            rows, sums = _outer(add, Y, turned, width)
            node.replace_all_uses_with(add(aten.mm.default, add(aten.t.default, sums), rows))


def _outer(add: Add, Y: _Product, H: fx.Node, width: int) -> tuple[fx.Node, fx.Node]:
    """`R` and `Zᵀ H`, of which `Yᵀ H` is the product, with a row for each direction and each part of a sample."""
    rows = add(aten.reshape.default, Y.R, [-1, width])
    return rows, add(aten.reshape.default, _weighed(add, Y, H), [-1, shape_of(H)[-1]])


def _weighed(add: Add, Y: _Product, H: fx.Node) -> fx.Node:
    """`Zᵀ H`: for each direction a sum over the samples."""
    return add(aten.mm.default, add(aten.t.default, Y.scaled(add)), add(aten.reshape.default, H, [Y.batch, -1]))


def _sum(add: Add, node: fx.Node, Y: _Product) -> None:
    """The sum over all rows, the gradient of a bias, where nothing else needs `Y` any more."""
    y, dims, *keep = node.args
    assert isinstance(y, fx.Node)
    alone = all(user.target is aten.sum.dim_IntList for user in y.users)
    if alone and dims == [0] and not node.kwargs and Y.in_rows_of(shape_of(y)[1:].numel()):
        made = _total(add, Y, [-1, *shape_of(y)[1:]], [0, 1])
        node.replace_all_uses_with(add(aten.unsqueeze.default, made, 0) if keep == [True] else made)


def _total(add: Add, Y: _Product, shape: Sequence[int], over: Sequence[int]) -> fx.Node:
    """The sum over the samples and over some of the dimensions of `(k, *shape)`."""
    weights = add(aten.sum.dim_IntList, Y.scaled(add), [0])
    R = add(aten.reshape.default, Y.R, [Y.k, *shape])
    weights = add(aten.reshape.default, weights, [-1] + [1] * len(shape))
    return add(aten.sum.dim_IntList, add(aten.mul.Tensor, R, weights), over)


def _convolution(add: Add, node: fx.Node, low: dict[fx.Node, _Product]) -> None:
    """The gradients of a convolution: of its input, its weight and its bias.

    Channels come last, since that is how `torch.compile` lays out what convolutions read.
    """
    given: Any = node.args
    y, x, weight, *rest, mask = given
    Y, inner = low.get(y), shape_of(weight)[1:].numel()
    if Y is None or shape_of(y)[0] != Y.batch or not Y.pays(inner, shape_of(y).numel() * inner):
        return
    directions = laid_out(add, _last(add, add(aten.reshape.default, Y.R, [Y.k, *shape_of(y)[1:]])))
    turned = _last(add, x)
    inputs = add(aten.reshape.default, _weighed(add, Y, turned), [Y.k, *shape_of(turned)[1:]])
    wanted = [*mask[:2], False]
    by_directions = _first(add, directions), _first(add, inputs), weight
    made = add(aten.convolution_backward.default, *by_directions, *rest, wanted)
    for part in list(node.users):
        if part.args[1] == 0:
            columns = add(aten.reshape.default, _last(add, add(getitem, made, 0)), [Y.k, -1])
            found = add(aten.reshape.default, add(aten.mm.default, Y.scaled(add), columns), list(shape_of(turned)))
            found = laid_out(add, _first(add, found), layout_of(part))
        elif part.args[1] == 1:
            found = laid_out(add, add(getitem, made, 1), layout_of(part))
        else:
            found = _total(add, Y, [shape_of(y)[1], -1], [0, 2])
        part.replace_all_uses_with(found)


def _last(add: Add, node: Any) -> fx.Node:
    """With the channels behind the positions."""
    return add(aten.permute.default, node, [0, *range(2, len(shape_of(node))), 1])


def _first(add: Add, node: Any) -> fx.Node:
    """With the channels before the positions again."""
    dims = len(shape_of(node))
    return add(aten.permute.default, node, [0, dims - 1, *range(1, dims - 1)])


_REWRITES = {aten.mm.default: _mm, aten.convolution_backward.default: _convolution}
