"""Rewritten graphs through PyTorch's compiler on CUDA: the gradients of the uncompiled step, in float64."""

from __future__ import annotations

import pytest

from rewritten_networks import METHODS, assert_same, gradients, networks, of_method

CHOSEN = ("wperp", "exact top", "three tangents", "chained")


@pytest.mark.parametrize("network", networks())
@pytest.mark.parametrize("method", [name for name in METHODS if name in CHOSEN])
def test_the_compiled_step_has_the_same_gradients(network: str, method: str):
    model, x = networks()[network]
    guess, options = of_method(method, network)
    model, x = model.cuda(), x.cuda()
    plain, graph = (gradients(model, guess, x, compile=on, **options) for on in (False, True))
    assert_same(graph, plain, rtol=1e-7)
