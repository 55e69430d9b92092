"""From the gradients at the sites to those of the parameters: the local chain rule of each layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradguess as gg
from asserts import assert_close
from models import BATCH, ZOO, BareParameters, Case, Repeats, generator, make
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
    assert layout_of(case).has_closed_gradients
    assert_close(oracle(case, stored=stored), gradients(case))


def test_scaling_by_frequency_counts_the_whole_batch():
    """Autograd scales by how often a word occurs in the call, not in a sample."""
    torch.manual_seed(0)
    case = layer_case(nn.Embedding(3, 2, scale_grad_by_freq=True), torch.randint(3, (4, 5)))
    case.losses().mean().backward()
    torch.testing.assert_close(oracle(case)["0.weight"], case.model[0].weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_general_path_agrees(layer):
    torch.manual_seed(1)
    case = LAYERS[layer]()
    assert_close(oracle(case, closed=False), gradients(case))


GENERAL = {
    "attention": lambda: layer_case(_Attention(), normal(4, 3, 6)),
    "encoder-layer": lambda: layer_case(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0), normal(4, 3, 6)
    ),
    "lstm": lambda: layer_case(_First(nn.LSTM(5, 3, num_layers=2, batch_first=True)), normal(4, 3, 5)),
    "gru": lambda: layer_case(_First(nn.GRU(5, 3, bidirectional=True, batch_first=True)), normal(4, 3, 5)),
    "lstm-cell": lambda: layer_case(_First(nn.LSTMCell(5, 3)), normal(4, 5)),
    "bilinear": lambda: layer_case(_Twice(nn.Bilinear(5, 5, 3)), normal(4, 5)),
    "prelu": lambda: layer_case(nn.PReLU(5), normal(4, 5)),
    "conv-same-circular": lambda: layer_case(
        nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), normal(4, 2, 6)
    ),
    "weight-norm": lambda: layer_case(parametrizations.weight_norm(nn.Linear(5, 3)), normal(4, 5)),
    "embedding-bag": lambda: layer_case(nn.EmbeddingBag(6, 3), torch.randint(6, (4, 5))),
    "linear-subclass": lambda: layer_case(_Doubled(5, 3), normal(4, 5)),
}


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class _First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class _Twice(_First):
    def forward(self, x):
        return self.inner(x, x)


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", GENERAL)
def test_other_layers_get_a_vjp(layer):
    torch.manual_seed(1)
    case = GENERAL[layer]()
    assert not layout_of(case).has_closed_gradients
    assert_close(oracle(case, stored=True), gradients(case))


@pytest.mark.parametrize("sites", ["auto", "leaf"])
@pytest.mark.parametrize("name", ZOO)
def test_true_site_gradients_give_backpropagation(name, sites):
    case = make(name)
    assert_close(oracle(case, sites), gradients(case))


def test_tied_weights_add_up_in_closed_form():
    case = make("tied")
    assert layout_of(case).has_closed_gradients
    assert_close(oracle(case, stored=True), gradients(case))


def test_layers_written_as_functions():
    """Parameters that no module call owns belong to the site above them, or to the tail."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 4)

        def forward(self, x):
            x = F.relu(self.a(x))
            x = F.relu(F.linear(x, self.b.weight, self.b.bias))
            return F.linear(F.relu(self.c(x)), torch.eye(4), None)

    torch.manual_seed(0)
    case = Case(Functional(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))
    assert [site.name for site in layout_of(case).sites] == ["a", "c"]
    assert_close(oracle(case), gradients(case), atol=1e-6)


def test_keyword_arguments_of_a_layer():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 4)

        def forward(self, x):
            return self.b(input=torch.relu(self.a(input=x)))

    torch.manual_seed(0)
    case = Case(Keywords(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))
    assert_close(oracle(case, stored=True), gradients(case), atol=1e-6)


@pytest.mark.parametrize("module", [Repeats, BareParameters])
def test_estimate_covers_every_parameter(module):
    torch.manual_seed(0)
    case = Case(module(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))
    est = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args, generator=generator())
    assert est.grads.keys() == dict(case.model.named_parameters()).keys()
    assert all(grad.abs().sum() > 0 for grad in est.grads.values())


@pytest.mark.parametrize("stored", [True, False], ids=["store", "replay"])
def test_a_hook_that_changes_the_output_of_a_layer_is_part_of_it(stored):
    """The layer is then no longer `W x + b`, whatever its type says."""
    case = make("relu-bias")
    case.model[2].register_forward_hook(lambda module, args, output: output * 1.5)
    assert_close(oracle(case, stored=stored), gradients(case))
