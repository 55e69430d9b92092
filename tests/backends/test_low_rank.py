"""Products with what has a low rank go by the low rank, and the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gradguess.backends import thin_products, tracing
from gradguess.backends.rewriting import small_on
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


@pytest.mark.parametrize(
    "scale",
    [
        lambda y, u: y * u,  # a gate: another number for each unit
        lambda y, u: y * u[0, :, :, 0][:, :, None],  # for each position
        lambda y, u: y + u,
        lambda y, u: y.transpose(1, 2).reshape(1, B, T, C),
        lambda y, u: y.flip(1),
    ],
    ids=["gate", "positions", "sum", "turned", "flipped"],
)
def test_what_is_not_of_low_rank_is_left(scale: Callable[[Tensor, Tensor], Tensor]):
    Z, V, u, M = randn(B, k), randn(T * C, k), randn(1, B, T, C), randn(C, H)

    def step(Z, V, u, M):
        g = scale((Z @ V.t()).view(1, B, T, C), u).reshape(B * T, C)
        return [g @ M, g.t() @ g]

    assert work(traced(step, Z, V, u, M)) == B * k * T * C + B * T * C * H + B * T * C * C


def test_numbers_and_positions_of_the_batch_are_told_apart():
    """With as many positions as samples a factor for each position has the size of one for each sample."""
    Z, V, c, M = randn(B, k), randn(B * C, k), randn(B), randn(C, H)

    def step(Z, V, c, M):
        return [((Z @ V.t()).view(B, B, C) * c[:, None]).reshape(B * B, C) @ M]

    assert work(traced(step, Z, V, c, M)) == B * k * B * C + B * B * C * H


def test_a_high_rank_is_left():
    Z, V, c, M = randn(B, 15), randn(T * C, 15), randn(1, B), randn(C, H)
    graph = traced(lambda Z, V, c, M: [guess(Z, V, c) @ M], Z, V, c, M)
    assert work(graph) == B * 15 * T * C + B * T * C * H


def test_a_small_product_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "small_on", lambda device: B * T * C * H)
    Z, V, c, M = randn(B, k), randn(T * C, k), randn(1, B), randn(C, H)
    graph = traced(lambda Z, V, c, M: [guess(Z, V, c) @ M], Z, V, c, M)
    assert work(graph) == B * k * T * C + B * T * C * H


def test_half_precision_is_left():
    """Another order rounds otherwise, and half precision shows it."""
    Z, V, M = (t.bfloat16() for t in (randn(B, k), randn(C, k), randn(C, H)))
    graph = trace(lambda Z, V, M: [(Z @ V.t()) @ M], (Z, V, M))
    assert work(graph) == B * k * C + B * C * H


@pytest.mark.parametrize("width", [2 * C, 3 * C // 2])
def test_rows_that_lie_in_two_samples_are_left(width: int):
    """A layer over positions, whose output is then read in longer rows: `Z` has a row for each position."""
    n = 3 * C // 2  # divides neither width
    Z, V, M, x = randn(B * 4, k), randn(n, k), randn(width, H), randn(B * 4 * n // width, H)

    def step(Z, V, M, x):
        g = (Z @ V.t()).reshape(-1, width)
        return [g @ M, g.t() @ x, x.t() @ g, g.sum(0)]

    traced(step, Z, V, M, x)


def test_sums_over_tangents_are_left():
    Z, V = randn(B, k), randn(T * C, k)
    traced(lambda Z, V: [(Z @ V.t()).view(2, B // 2, T * C).sum(0), (Z @ V.t())[None].sum(0)], Z, V)


def test_whole_numbers_are_left():
    Z, V, M = (torch.randint(5, shape) for shape in ((B, k), (C, k), (C, H)))
    traced(lambda Z, V, M: [(Z @ V.t() * 0.5) @ M.float()], Z, V, M)


def test_a_rank_of_zero_is_left():
    traced(lambda Z, V, M: [Z @ V.t() @ M], randn(B, 0), randn(C, 0), randn(C, H))


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


def test_a_factor_that_several_samples_share_is_left():
    """As many numbers along two dimensions as there are samples, of which the factor varies along one."""
    Z, V, c, M = randn(B, k), randn(C, k), randn(1, B // 2, 1), randn(C, H)

    def step(Z, V, c, M):
        return [((Z @ V.t()).view(2, B // 2, C) * c).view(B, C) @ M]

    assert work(traced(step, Z, V, c, M)) == B * k * C + B * C * H


def test_maps_that_are_parts_of_a_sample_are_left():
    W, x, Z, V = randn(8, 12, 3, 3), randn(2 * B, 12, 9, 8), randn(B, k), randn(2 * 8 * 9 * 8, k)

    def step(W, x, Z, V):
        sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        g = (Z @ V.t()).view(2 * B, 8, 9, 8)
        return list(torch.ops.aten.convolution_backward.default(g, x, W, None, *sizes)[:2])

    traced(step, W, x, Z, V)


def test_a_part_of_a_product_is_left():
    Z, V, M = randn(B, k), randn(C, k), randn(C, H)
    traced(
        lambda Z, V, M: [(Z @ V.t()).view(2, B // 2, C).select(0, 1) @ M, (Z @ V.t())[:, :1].expand(B, C) @ M], Z, V, M
    )


def test_a_product_is_small_for_longer_where_kernels_are_started():
    assert small_on(torch.device("cpu")) < small_on(torch.device("cuda"))
