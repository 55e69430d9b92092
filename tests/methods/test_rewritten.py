"""Compiled steps whose graph is written anew (low rank, gradients of norms) against uncompiled ones, on any layout.

Everything counts as large here, so that small networks are rewritten too. Each network once broke a rewrite.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends import channels_last, inductor, tracing
from gradguess.methods import compiled
from rewritten_networks import METHODS, assert_same, gradients, networks, of_method
from traced_graphs import as_compiled


@pytest.fixture(autouse=True)
def _all_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiled", as_compiled)
    monkeypatch.setattr(tracing, "small_on", lambda device: 0)
    monkeypatch.setattr(tracing, "large_on", lambda device: 2**20)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", networks())
def test_the_graph_has_the_same_gradients(network, method):
    model, x = networks()[network]
    guess, options = of_method(method, network)
    plain, graph = (gradients(model, guess, x, compile=on, **options) for on in (False, True))
    assert_same(graph, plain, rtol=1e-9)


@pytest.mark.parametrize("network", networks())
def test_thin_products_have_the_same_gradients(network, monkeypatch):
    """All of them are small enough to be written out."""
    monkeypatch.setattr(tracing, "small_on", lambda device: 2**40)
    test_the_graph_has_the_same_gradients(network, "wperp")


@pytest.mark.parametrize("method", ["wperp", "chained", "backprop"])
@pytest.mark.parametrize("network", ["maps", "channels last", "batch norm"])
def test_turned_channels_have_the_same_gradients(network, method, monkeypatch):
    """As on a GPU; also where nothing is of low rank."""
    monkeypatch.setattr(tracing, "turns_channels", lambda device: True)
    monkeypatch.setattr(channels_last, "MANY", 2**20)
    test_the_graph_has_the_same_gradients(network, method)
    monkeypatch.setattr(tracing, "in_cheaper_order", lambda graph, small: graph)
    test_the_graph_has_the_same_gradients(network, method)


def operations(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the graph of a step of W⊥."""
    seen = []
    monkeypatch.setattr(compiled, "compiled", lambda graph, arguments: seen.append(graph) or graph)
    gradients(model, gg.WPerp(k=3), x, compile=True)
    return [str(node.target) for node in seen[-1].graph.nodes]


def test_the_graphs_are_rewritten(monkeypatch):
    """Else the test above would show nothing."""
    for name in ("turned weights", "flat weights"):
        assert not any("layer_norm_backward" in op for op in operations(*networks()[name], monkeypatch))
    before = operations(*networks()["maps"], monkeypatch).count("aten.mm.default")
    monkeypatch.setattr(tracing, "small_on", lambda device: 2**40)
    assert before > operations(*networks()["maps"], monkeypatch).count("aten.mm.default")


def test_a_kernel_that_cannot_be_tiled_is_no_error_of_the_compiler():
    """PyTorch 2.11 raises without arguments what takes two, where it would take another way."""
    simd = pytest.importorskip("torch._inductor.codegen.simd")
    with inductor._tiles_or_not(), pytest.raises(simd.CantSplit):
        raise simd.CantSplit
    with pytest.raises(TypeError, match="argument"):
        raise simd.CantSplit
