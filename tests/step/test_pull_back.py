"""From the gradients at the sites to those of the parameters: the local chain rule of each layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asserts import assert_close
from models import ZOO, Case, make
from references import gradients
from steps import layout_of, oracle


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (torch.tanh(outputs) * targets).flatten(1).sum(1)


def layer_case(layer: nn.Module, x: Tensor) -> Case:
    layer = layer.double()
    with torch.no_grad():
        for p in layer.parameters():  # norms start at one and zero
            p.add_(torch.randn_like(p) * 0.3)
        out = layer(x)
    return Case(nn.Sequential(layer), x, torch.randn_like(out), weighted)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


LAYERS = {
    "linear": lambda: layer_case(nn.Linear(5, 3), normal(4, 5)),
    "linear-3d": lambda: layer_case(nn.Linear(5, 3), normal(4, 2, 5)),
    "linear-no-bias": lambda: layer_case(nn.Linear(5, 3, bias=False), normal(4, 2, 3, 5)),
    "conv1d-strided": lambda: layer_case(nn.Conv1d(2, 4, 3, stride=2, padding=1), normal(4, 2, 8)),
    "conv2d-grouped": lambda: layer_case(nn.Conv2d(4, 6, (3, 2), groups=2, bias=False), normal(4, 4, 6, 5)),
    "conv2d-dilated": lambda: layer_case(nn.Conv2d(2, 3, 3, dilation=2, padding=(1, 2)), normal(4, 2, 7, 6)),
    "conv3d": lambda: layer_case(nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), normal(4, 2, 3, 4, 3)),
    "transposed1d": lambda: layer_case(nn.ConvTranspose1d(3, 2, 3, stride=2, output_padding=1), normal(4, 3, 5)),
    "transposed2d": lambda: layer_case(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, padding=1), normal(4, 4, 3, 4)),
    "transposed3d": lambda: layer_case(nn.ConvTranspose3d(2, 2, 2), normal(4, 2, 2, 3, 2)),
    "layer-norm": lambda: layer_case(nn.LayerNorm(5), normal(4, 3, 5)),
    "layer-norm-2d": lambda: layer_case(nn.LayerNorm((3, 5)), normal(4, 2, 3, 5)),
    "layer-norm-no-bias": lambda: layer_case(nn.LayerNorm(5, bias=False), normal(4, 5)),
    "rms-norm": lambda: layer_case(nn.RMSNorm(5), normal(4, 3, 5)),
    "group-norm": lambda: layer_case(nn.GroupNorm(2, 4), normal(4, 4, 3, 2)),
    "batch-norm1d": lambda: layer_case(nn.BatchNorm1d(3), normal(4, 3)),
    "batch-norm2d": lambda: layer_case(nn.BatchNorm2d(3), normal(4, 3, 2, 2)),
    "batch-norm-eval": lambda: _evaluated(layer_case(nn.BatchNorm1d(3), normal(4, 3, 5))),
    "batch-norm-no-statistics": lambda: _evaluated(
        layer_case(nn.BatchNorm1d(3, track_running_stats=False), normal(4, 3, 5))
    ),
    "embedding": lambda: layer_case(nn.Embedding(6, 3), torch.randint(6, (4, 5))),
    "embedding-padding": lambda: layer_case(nn.Embedding(6, 3, padding_idx=2), torch.randint(4, (4, 9))),
    "embedding-by-frequency": lambda: layer_case(nn.Embedding(6, 3, scale_grad_by_freq=True), torch.randint(6, (4, 5))),
}


def _evaluated(case: Case) -> Case:
    case.model(case.inputs * 2 + 1)  # statistics that are not the batch's
    case.model.eval()
    return case


@pytest.mark.parametrize("stored", [True, False], ids=["store", "replay"])
@pytest.mark.parametrize("layer", LAYERS)
def test_closed_form_is_the_layers_own_vjp(layer, stored):
    torch.manual_seed(1)
    case = LAYERS[layer]()
    assert not layout_of(case).needs_graph
    assert_close(oracle(case, stored=stored), gradients(case))


def test_scaling_by_frequency_counts_the_whole_batch():
    """Autograd scales by how often a word occurs in the call, not in a sample."""
    torch.manual_seed(0)
    case = layer_case(nn.Embedding(3, 2, scale_grad_by_freq=True), torch.randint(3, (4, 5)))
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
