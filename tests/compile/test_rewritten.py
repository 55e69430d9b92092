"""Compiled steps whose graph is written anew (gradients of norms) against uncompiled ones, on any layout.

Each network once broke a rewrite.
"""

from __future__ import annotations

import pytest

import gradguess as gg
from combinations import pairwise
from gradguess.compile import compiler
from rewritten_networks import METHODS, assert_same, gradients, networks, of_method
from traced_graphs import as_compiled


@pytest.mark.parametrize(("network", "method"), pairwise(networks(), METHODS))
def test_the_graph_has_the_same_gradients(network, method, monkeypatch):
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    model, x = networks()[network]
    guess, options = of_method(method, network)
    plain, graph = (gradients(model, guess, x, compile=on, **options) for on in (False, True))
    assert_same(graph, plain, rtol=1e-9)


@pytest.mark.parametrize("network", ["turned weights", "flat weights"])
def test_the_graph_is_rewritten(network, monkeypatch):
    """Else the test above would show nothing."""
    seen = []
    monkeypatch.setattr(compiler, "compiled", lambda graph, arguments: seen.append(graph) or graph)
    model, x = networks()[network]
    gradients(model, gg.WPerp(k=3), x, compile=True)
    assert not any("layer_norm_backward" in str(node.target) for node in seen[-1].graph.nodes)
