"""Steps through PyTorch's compiler on CUDA: the gradients of the uncompiled step, in float64."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from gpu_networks import METHODS, NETWORKS, batch, loss_fn, make


@pytest.mark.parametrize("options", [{}, {"tangents": 3}, {"top": "exact"}], ids=str)
@pytest.mark.parametrize("method", ["wperp", "chained"])
@pytest.mark.parametrize("network", [name for name in NETWORKS if name != "recurrent"])
def test_the_compiled_step_has_the_same_gradients(network: str, method: str, options: dict):
    found = []
    for compile in (False, True):
        model = make(network, torch.float64)
        forward = gg.ForwardGradient(model, METHODS[method](), compile=compile, **options)
        for _ in range(3):
            model.zero_grad()
            forward(loss_fn, *batch(24, torch.float64))
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-7, atol=1e-10)
