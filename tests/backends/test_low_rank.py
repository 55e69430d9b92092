"""Products with what has a low rank go by the low rank, and the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gradguess.backends import thin_products, tracing
from gradguess.backends.tracing import trace

B, k, T, C, H = 40, 3, 4, 24, 20


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "small_on", lambda device: 0)
    monkeypatch.setattr(thin_products, "SHORT", 0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def traced(function: Callable[..., list[Tensor]], *arguments: Tensor) -> fx.GraphModule:
    """The trace, which computes what the function does."""
    graph = trace(function, arguments)
    for found, wanted in zip(graph(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
        assert found.stride() == wanted.stride()
    return graph


def work(graph: fx.GraphModule) -> int:
    """Multiplications of all products."""
    total = 0
    for n in graph.graph.nodes:
        if n.target is torch.ops.aten.mm.default:
            left, right = (a.meta["tensor_meta"].shape for a in n.args)
            total += left.numel() * right[1]
    return total


def guess(Z: Tensor, V: Tensor, c: Tensor) -> Tensor:
    """Rows of positions, as a step computes them: `c z Vᵀ`."""
    y = (Z @ V.t()).unsqueeze(0).view(-1, B, T, C)
    return (y * c.view(-1, B, 1, 1))[0].reshape(B * T, C)


def test_below_the_site():
    Z, V, c, M = randn(B, k), randn(T * C, k), randn(1, B), randn(C, H)
    graph = traced(lambda Z, V, c, M: [guess(Z, V, c) @ M], Z, V, c, M)
    assert work(graph) == k * T * C * H + B * k * T * H


@pytest.mark.parametrize("turned", [False, True])
def test_weights_of_the_site(turned: bool):
    Z, V, c, x = randn(B, k), randn(T * C, k), randn(1, B), randn(B * T, H)

    def step(Z, V, c, x):
        g = guess(Z, V, c)
        return [x.t() @ g if turned else g.t() @ x]

    graph = traced(step, Z, V, c, x)
    assert work(graph) == B * k * T * H + k * T * C * H


def test_the_bias_too_where_nothing_else_needs_the_guess():
    Z, V, c, M = randn(B, k), randn(T * C, k), randn(1, B), randn(C, H)

    def step(Z, V, c, M):
        g = guess(Z, V, c)
        return [g @ M, g.sum(0, keepdim=True), g.sum(0)]

    graph = traced(step, Z, V, c, M)
    assert not any(tuple(n.meta["tensor_meta"].shape) == (B * T, C) for n in graph.graph.nodes if _is_tensor(n))


def test_a_guess_that_is_needed_stays():
    Z, V, c, M = randn(B, k), randn(T * C, k), randn(1, B), randn(C, H)

    def step(Z, V, c, M):
        g = guess(Z, V, c)
        return [g @ M, g.sum(0), g]

    graph = traced(step, Z, V, c, M)
    sums = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sum.dim_IntList]
    assert [tuple(n.args[0].meta["tensor_meta"].shape) for n in sums] == [(B * T, C)]


def _is_tensor(node: fx.Node) -> bool:
    return hasattr(node.meta.get("tensor_meta"), "shape")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions(groups: int, dims: int):
    convolve = (F.conv1d, F.conv2d)[dims - 1]
    sides, inside = [9, 8][:dims], 12
    W, b, x = randn(8, inside // groups, *[3] * dims), randn(8), randn(B, inside, *sides)
    above = convolve(x, W, b, 2, 1, 1, groups)
    Z, V, c = randn(B, k), randn(above[0].numel(), k), randn(B)

    def step(W, b, x, Z, V, c):
        g = (Z @ V.t()).view(above.shape) * c.view(B, *[1] * (dims + 1))
        sizes = [2] * dims, [1] * dims, [1] * dims, False, [0] * dims, groups, [True, True, True]
        return list(torch.ops.aten.convolution_backward.default(g, x, W, [8], *sizes))

    graph = traced(step, W, b, x, Z, V, c)
    nodes = [n for n in graph.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    assert [n.args[0].meta["tensor_meta"].shape[0] for n in nodes] == [k]


def test_a_small_product_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "small_on", lambda device: B * T * C * H)
    Z, V, c, M = randn(B, k), randn(T * C, k), randn(1, B), randn(C, H)
    graph = traced(lambda Z, V, c, M: [guess(Z, V, c) @ M], Z, V, c, M)
    assert work(graph) == B * k * T * C + B * T * C * H


def test_maps_with_channels_last():
    W, x = randn(8, 12, 3, 3), randn(B, 12, 9, 8).to(memory_format=torch.channels_last)
    Z, V = randn(B, k), randn(8 * 9 * 8, k)

    def step(W, x, Z, V):
        g = (Z @ V.t()).view(B, 8, 9, 8)
        sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        below, weight, _ = torch.ops.aten.convolution_backward.default(g, x, W, None, *sizes)
        return [below.permute(0, 2, 3, 1).view(-1), weight]

    graph = trace(step, (W, x, Z, V))
    torch.testing.assert_close(list(graph(W, x, Z, V)), step(W, x, Z, V), rtol=1e-11, atol=1e-11)


def test_two_factors():
    Z, V, c, M = randn(B, k), randn(C, k), randn(B, 1), randn(C, H)
    graph = traced(lambda Z, V, c, M: [((Z @ V.t()) * c * (c + 2) * 3.0) @ M], Z, V, c, M)
    assert work(graph) == k * C * H + B * k * H


# --- what is left as it was ----------------------------------------------------------------------------------


def scaled(scale: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    def step(Z: Tensor, V: Tensor, u: Tensor, M: Tensor) -> list[Tensor]:
        g = scale((Z @ V.t()).view(1, B, T, C), u).reshape(B * T, C)
        return [g @ M, g.t() @ g]

    return step


def in_longer_rows(width: int) -> Callable[..., list[Tensor]]:
    """A layer over positions, whose output is then read in rows that lie in two samples: `Z` has one for each."""

    def step(Z: Tensor, V: Tensor, M: Tensor, x: Tensor) -> list[Tensor]:
        g = (Z @ V.t()).reshape(-1, width)
        return [g @ M, g.t() @ x, x.t() @ g, g.sum(0)]

    return step


def half_maps(W: Tensor, x: Tensor, Z: Tensor, V: Tensor) -> list[Tensor]:
    sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    g = (Z @ V.t()).view(2 * B, 8, 9, 8)
    return list(torch.ops.aten.convolution_backward.default(g, x, W, None, *sizes)[:2])


BATCHED = [(B, k), (T * C, k), (1, B, T, C), (C, H)]
PLAIN = [(B, k), (C, k), (C, H)]
ODD = 3 * C // 2  # divides no width
LEFT: dict[str, tuple[Callable[..., list[Tensor]], list[tuple[int, ...]]]] = {
    "a gate, another number for each unit": (scaled(lambda y, u: y * u), BATCHED),
    "a number for each position": (scaled(lambda y, u: y * u[0, :, :, 0][:, :, None]), BATCHED),
    "a sum": (scaled(lambda y, u: y + u), BATCHED),
    "turned": (scaled(lambda y, u: y.transpose(1, 2).reshape(1, B, T, C)), BATCHED),
    "flipped": (scaled(lambda y, u: y.flip(1)), BATCHED),
    "as many positions as samples": (  # a factor for each position has the size of one for each sample
        lambda Z, V, c, M: [((Z @ V.t()).view(B, B, C) * c[:, None]).reshape(B * B, C) @ M],
        [(B, k), (B * C, k), (B,), (C, H)],
    ),
    "a factor that several samples share": (
        lambda Z, V, c, M: [((Z @ V.t()).view(2, B // 2, C) * c).view(B, C) @ M],
        [(B, k), (C, k), (1, B // 2, 1), (C, H)],
    ),
    "a high rank": (lambda Z, V, c, M: [guess(Z, V, c) @ M], [(B, 15), (T * C, 15), (1, B), (C, H)]),
    "a rank of zero": (lambda Z, V, M: [Z @ V.t() @ M], [(B, 0), (C, 0), (C, H)]),
    "rows in two samples": (in_longer_rows(2 * C), [(B * 4, k), (ODD, k), (2 * C, H), (B * 4 * ODD // (2 * C), H)]),
    "sums over tangents": (
        lambda Z, V: [(Z @ V.t()).view(2, B // 2, T * C).sum(0), (Z @ V.t())[None].sum(0)],
        [(B, k), (T * C, k)],
    ),
    "maps that are parts of a sample": (half_maps, [(8, 12, 3, 3), (2 * B, 12, 9, 8), (B, k), (2 * 8 * 9 * 8, k)]),
    "a part of a product": (
        lambda Z, V, M: [(Z @ V.t()).view(2, B // 2, C).select(0, 1) @ M, (Z @ V.t())[:, :1].expand(B, C) @ M],
        PLAIN,
    ),
}


def operations(graph: fx.GraphModule) -> list[str]:
    return sorted(str(node.target) for node in graph.graph.nodes)


def assert_left(step: Callable[..., list[Tensor]], *arguments: Tensor) -> None:
    """The trace holds the operations that it holds where nothing is written anew."""
    found = operations(trace(step, arguments))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "in_cheaper_order", lambda graph, small: graph)
        assert found == operations(trace(step, arguments))


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_of_low_rank_is_left(case: str):
    step, shapes = LEFT[case]
    arguments = [randn(*shape) for shape in shapes]
    traced(step, *arguments)
    assert_left(step, *arguments)


def test_other_numbers_than_those_of_single_and_double_precision_are_left():
    """Another order rounds otherwise, and half precision shows it."""
    assert_left(lambda Z, V, M: [(Z @ V.t()) @ M], *(randn(*shape).bfloat16() for shape in PLAIN))
    assert_left(lambda Z, V, M: [(Z @ V.t() * 0.5) @ M.float()], *(torch.randint(5, shape) for shape in PLAIN))
