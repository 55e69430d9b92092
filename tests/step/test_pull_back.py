"""From the gradients at the sites to those of the parameters: the local chain rule of each layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from asserts import assert_close
from models import ZOO, Case, make
from references import gradients
from steps import oracle


def test_scaling_by_frequency_counts_the_whole_batch():
    """Autograd scales by how often a word occurs in the call, not in a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)).double()
    targets = torch.randn(4, 5, 2, dtype=torch.float64)
    case = Case(model, torch.randint(3, (4, 5)), targets, lambda out, t: (out.tanh() * t).flatten(1).sum(1))
    case.losses().mean().backward()
    torch.testing.assert_close(oracle(case)["0.weight"], case.model[0].weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sites", ["auto", "leaf"])
@pytest.mark.parametrize("name", ZOO)
def test_true_site_gradients_give_backpropagation(name, sites):
    case = make(name)
    assert_close(oracle(case, sites), gradients(case))


@pytest.mark.parametrize("stored", [True, False], ids=["store", "replay"])
def test_a_hook_that_changes_the_output_of_a_layer_is_part_of_it(stored):
    """The layer is then no longer `W x + b`, whatever its type says."""
    case = make("relu-bias")
    case.model[2].register_forward_hook(lambda module, args, output: output * 1.5)
    assert_close(oracle(case, stored=stored), gradients(case))
