"""Products that share their matrix are one product, and the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.backends import thin_products, tracing
from gradguess.backends.tracing import trace

PRODUCTS = ("mm", "addmm", "convolution")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_products, "SHORT", 0)
    monkeypatch.setattr(tracing, "large_on", lambda device: 2**20)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def products(function: Callable[..., list[Tensor]], *arguments: Tensor) -> int:
    """The number of products in the trace, which computes what the function does."""
    graph = trace(function, arguments)
    for found, wanted in zip(graph(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.stride() == wanted.stride()
    return sum(getattr(n.target, "__name__", "").split(".")[0] in PRODUCTS for n in graph.graph.nodes)


def test_a_value_and_its_tangent_go_through_a_layer_together():
    W, V, b, x, t = randn(4, 3), randn(2, 4), randn(4), randn(5, 3), randn(5, 3)

    def step(W, V, b, x, t):
        s, u = torch.addmm(b, x, W.t()), t @ W.t()
        return [s.relu() @ V.t(), (u * (s > 0)) @ V.t()]

    assert products(step, W, V, b, x, t) == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions(groups: int, dims: int):
    convolve = F.conv1d if dims == 1 else F.conv2d
    sides = [7, 6][:dims]
    W, b, x, t = randn(4, 2 // groups, *[3] * dims), randn(4), randn(5, 2, *sides), randn(5, 2, *sides)

    def step(W, b, x, t):
        return [convolve(x, W, b, 2, 1, 1, groups), convolve(t, W, None, 2, 1, 1, groups)]

    assert products(step, W, b, x, t) == 1


def test_large_products_stay(monkeypatch):
    monkeypatch.setattr(tracing, "large_on", lambda device: 14)
    W, x, t = randn(3, 4), randn(5, 3), randn(5, 3)
    assert products(lambda W, x, t: [x @ W, t @ W], W, x, t) == 2


def test_the_order_stays_where_batch_norm_writes_its_buffers():
    W, x, t, mean, var = randn(3, 4), randn(5, 3), randn(5, 3), torch.zeros(4).double(), torch.ones(4).double()

    def step(W, x, t, mean, var):
        mean, var = mean.clone(), var.clone()
        s = F.batch_norm(x @ W, mean, var, training=True)
        before = mean.clone()
        return [F.batch_norm(s, mean, var, training=True), t @ W, before, mean, var]

    assert products(step, W, x, t, mean, var) == 2


def test_many_levels_take_little_time():
    """A layer that is used at every step of two chains: each level is one product."""
    W, x, t = randn(3, 3) / 3, randn(5, 3), randn(5, 3)

    def step(W, x, t):
        for _ in range(50):
            x, t = (x @ W).sin(), (t @ W).cos()
        return [x, t]

    assert products(step, W, x, t) == 50


LAST = torch.channels_last
CASES: dict[str, tuple[int, Callable[..., list[Tensor]], list[Tensor]]] = {  # products, what is traced, and on what
    "three tangents": (1, lambda W, *rows: [row @ W for row in rows], [randn(3, 4), *(randn(5, 3) for _ in range(3))]),
    "strides that differ": (
        2,
        lambda W, x, t: [F.conv1d(x, W), F.conv1d(t, W, stride=2)],
        [randn(4, 2, 3), randn(5, 2, 7), randn(5, 2, 7)],
    ),
    "another number of rows": (2, lambda W, x, t: [x @ W, t @ W], [randn(3, 4), randn(5, 3), randn(2, 3)]),
    "a bias of full size": (
        2,
        lambda W, C, x, t: [torch.addmm(C, x, W), t @ W],
        [randn(3, 4), randn(5, 4), randn(5, 3), randn(5, 3)],
    ),
    "a bias for each sample": (  # a column of as many numbers as there are outputs is no row
        2,
        lambda W, b, x, t: [torch.addmm(b, x, W), t @ W],
        [randn(3, 5), randn(5, 1), randn(5, 3), randn(5, 3)],
    ),
    "a product that would wait for itself": (2, lambda W, x: [x @ W @ W], [randn(3, 3), randn(5, 3)]),
    "a layer that is used twice": (  # the second calls of value and tangent wait for the first ones
        2,
        lambda W, x, t: [(x @ W).sin() @ W, (t @ W).cos() @ W],
        [randn(3, 3), randn(5, 3), randn(5, 3)],
    ),
    "layers in another order": (  # both pairs stacked would wait for each other
        3,
        lambda A, B, x, t: [x @ A @ B, t @ B @ A],
        [randn(3, 3), randn(3, 3), randn(5, 3), randn(5, 3)],
    ),
    "half precision, which would round another time": (
        2,
        lambda W, b, x, t: [torch.addmm(b, x, W), t @ W],
        [v.bfloat16() for v in (randn(3, 4), randn(4), randn(5, 3), randn(5, 3))],
    ),
    "memory formats that differ": (
        2,
        lambda W, x, t: [F.conv2d(x, W), F.conv2d(t, W)],
        [randn(4, 2, 3, 3), randn(5, 2, 6, 6), randn(5, 2, 6, 6).to(memory_format=LAST)],
    ),
    "memory that is read by its place": (
        2,
        lambda W, x, t: [x @ W, (t @ W).as_strided((2, 2), (4, 1), 0)],
        [randn(3, 4), randn(5, 3), randn(5, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_how_many_products_are_left(case: str):
    count, step, arguments = CASES[case]
    assert products(step, *arguments) == count
