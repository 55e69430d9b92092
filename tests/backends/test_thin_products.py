"""Products of few terms are written out, and the graph computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.backends import tracing
from gradguess.backends.thin_products import SHORT


def products(left: Tensor, right: Tensor) -> int:
    """The number of products in the trace of one, which computes what the product does."""
    graph = tracing.trace(lambda a, b: [(a.t() @ b).relu()], [left.t().contiguous(), right])
    found, wanted = graph(left.t(), right)[0], (left @ right).relu()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert found.shape == wanted.shape
    assert found.stride() == wanted.stride()
    return sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize(("k", "left"), [(1, 0), (2, 0), (SHORT, 0), (SHORT + 1, 1)])
def test_of_few_terms(k: int, left: int):
    assert products(randn(7, k), randn(k, 5)) == left


def test_half_precision_is_left():
    """Sums would be rounded at each term."""
    assert products(*(torch.ones(shape, dtype=torch.bfloat16) for shape in ((7, 3), (3, 5)))) == 1


def test_no_terms_are_left():
    assert products(randn(7, 0), randn(0, 5)) == 1
