"""Reverse passes of convolutions with the channels last: the same numbers, in the layout that was there before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from gradguess.backends import channels_last as rewrite
from gradguess.backends.channels_last import channels_last
from gradguess.backends.tracing import trace

BACK = torch.ops.aten.convolution_backward.default


def reverse(dims: int = 2, groups: int = 1) -> tuple[fx.GraphModule, list[Tensor]]:
    """The gradients of a convolution, as a graph of which nothing is turned."""
    torch.manual_seed(0)
    shape = [6] * dims
    g, x, weight = (
        torch.randn(*s, dtype=torch.float64) for s in ((5, 8, *shape), (5, 4, *shape), (8, 4 // groups, *[3] * dims))
    )
    more = ([8], [1] * dims, [1] * dims, [1] * dims, False, [0] * dims, groups, [True] * 3)

    def function(g: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        out = torch.convolution(x, weight, None, *more[1:-1])
        return [t * 1 for t in (out, *BACK(g, x, weight, *more))]

    return trace(function, [g, x, weight]), [g, x, weight]


def layouts(graph: fx.GraphModule) -> list[torch.memory_format]:
    """Of what the reverse passes read."""
    nodes = [node for node in graph.graph.nodes if node.target is BACK]
    return [arg.meta["tensor_meta"].memory_format for node in nodes for arg in node.args[:3]]


def test_the_numbers_and_their_layout_stay_the_same():
    graph, given = reverse()
    wanted = graph(*given)
    assert layouts(graph) == [torch.contiguous_format] * 3
    channels_last(graph).recompile()
    assert layouts(graph) == [torch.channels_last] * 3
    for found, expected in zip(graph(*given), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("how", [{"groups": 2}, {"dims": 1}, {"dims": 3}], ids=str)
def test_others_are_left_alone(how):
    graph, _ = reverse(**how)
    assert layouts(channels_last(graph)) == [torch.contiguous_format] * 3


def test_few_convolutions_among_many_operations_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    graph, _ = reverse()
    monkeypatch.setattr(rewrite, "MANY", len(graph.graph.nodes))
    assert layouts(channels_last(graph)) == [torch.contiguous_format] * 3
    monkeypatch.setattr(rewrite, "MANY", len(graph.graph.nodes) + 1)
    assert layouts(channels_last(graph)) == [torch.channels_last] * 3
