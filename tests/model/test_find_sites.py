"""Which sites a model has, what lies above and below each, and the local chain rule to the parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradguess as gg
from asserts import assert_close
from gradguess.layout import lay_out
from gradguess.noise import Noise
from gradguess.sites import Layout
from gradguess.step import Step
from gradguess.task import Task
from models import BATCH, ZOO, BareParameters, Case, Repeats, generator, make
from references import gradients, no_trace, sample_gradients


def layout_of(case: Case, sites="auto") -> Layout:
    return lay_out(Task(case.model, *case.args), sites)


def names(case: Case, sites="auto") -> list[str]:
    return [site.name for site in layout_of(case, sites).sites]


# --- which sites ---------------------------------------------------------------------------------------------


def test_sites_of_a_plain_network_are_its_layers():
    assert names(make("relu-bias")) == ["0", "2", "4"]


def test_each_call_of_a_shared_module_is_a_site():
    case = make("repeats")
    assert names(case) == ["first", "again", "again#1", "last"]
    assert names(make("branching"), "leaf") == ["stem", "shared", "long.0", "long.2", "shared#1", "head"]


def test_a_residual_network_has_sites_at_its_stem_branches_and_head():
    case = make("residual")
    assert names(case) == ["0", "1.down", "2.down", "4"]
    assert names(case, "branch") == names(case)
    assert names(case, "leaf") == [
        "0", "1.norm", "1.up", "1.down", "2.norm", "2.up", "2.down", "3", "4",
    ]  # fmt: skip


def test_every_tensor_that_a_call_returns_is_a_site():
    assert names(make("lstm")) == ["rnn", "rnn[1]", "head"]


def test_named_containers_are_sites():
    assert names(make("branching"), ["stem", "long"]) == ["stem", "long"]


def test_what_the_loss_does_not_need_is_no_site():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.uncalled = nn.Linear(6, 4), nn.Linear(6, 3), nn.Linear(2, 2)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    case = Case(Unused(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))
    assert names(case) == ["used"]
    est = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args, generator=generator())
    assert est.grads["used.weight"].abs().sum() > 0
    for name in ("unused.weight", "uncalled.weight"):
        assert torch.equal(est.grads[name], torch.zeros_like(case.model.get_parameter(name)))


def test_the_frontier_crosses_no_other_site():
    layout = layout_of(make("branching"), "leaf")
    assert layout["stem"].above == ("shared", "long.0", "head")
    assert layout["long.2"].above == ("shared#1",)
    assert layout["shared"].above == ("head",)
    assert layout["head"].top
    assert layout["head"].reaches_output
    assert not layout["stem"].reaches_output
    residual = layout_of(make("residual"))
    assert residual["0"].above == ("1.down", "2.down", "4")
    assert residual["2.down"].above == ("4",)


@pytest.mark.parametrize("name", ["relu-bias", "gelu-no-bias", "tanh-bias", "in-place"])
def test_an_mlp_is_seen_in_closed_form(name):
    case = make(name)
    layout = layout_of(case)
    assert layout.closed
    assert [site.linear for site in layout.sites] == [case.model[2], case.model[4], None]


def test_dropout_and_shortcuts_are_not_mistaken_for_the_closed_form():
    layout = layout_of(make("dropout"))
    assert layout.stochastic
    assert layout["0"].linear is None
    assert all(site.linear is None for site in layout_of(make("branching"), "leaf").sites if site.name == "stem")


def test_parameters_between_the_sites_are_found():
    layout = layout_of(make("bare"))
    assert layout["first"].parameters == ("below", "first.weight", "first.bias")
    assert layout["last"].parameters == ("token", "a", "b", "last.weight", "last.bias")
    assert layout.tail == ("scale",)
    assert not layout.closed


def test_a_position_embedding_is_shared_by_the_batch():
    layout = layout_of(make("transformer"))
    assert layout["positions"].batch_dim is None
    assert layout["embed"].batch_dim == 0
    assert layout_of(make("gru-time-first"))["rnn"].batch_dim == 1


@pytest.mark.parametrize("tokens", [2, 3, 5, 8])
def test_a_sequence_as_long_as_a_batch_is_not_mistaken_for_it(tokens):
    """Positions (tokens, d) look like (batch, d) where both numbers agree."""
    torch.manual_seed(0)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.head = nn.Embedding(tokens, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.head(torch.tanh(x + self.positions(torch.arange(tokens))).mean(1))

    case = Case(Positions().double(), torch.randn(BATCH, tokens, 6).double(), torch.randint(4, (BATCH,)))
    assert layout_of(case)["positions"].batch_dim is None
    assert_close(oracle(case), gradients(case))


def test_laying_out_leaves_no_trace():
    case = make("batch-norm")
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    state = torch.get_rng_state()
    layout = layout_of(case)
    assert layout.mutates
    assert not layout.stochastic
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in case.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in case.model.modules())
    assert all(p.grad is None for p in case.model.parameters())


# --- from a site to the parameters ---------------------------------------------------------------------------


def oracle(case: Case, sites="auto", *, closed: bool | None = None, stored: bool = False) -> dict[str, Tensor]:
    """Parameter gradients from the *true* gradient at each site: must be backpropagation's."""
    task = Task(case.model, *case.args)
    layout = lay_out(task, sites)
    if closed is not None:
        layout = dataclasses.replace(layout, closed=closed)
    true = sample_gradients(case, [s.name for s in layout.sites], {s.name: s.slot for s in layout.sites})
    step = Step(task, layout, Noise(generator()))
    with no_trace(case.model):
        records = step.measure(gg.ActivationPerturbation()).records if stored else None
        grads = step.pull_back(lambda site, s: true[site.name].mean(0), records)
    return {n: grads.get(n, torch.zeros_like(p)) for n, p in case.model.named_parameters() if p.requires_grad}


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
    assert layout_of(case).closed
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
    assert not layout_of(case).closed
    assert_close(oracle(case, stored=True), gradients(case))


@pytest.mark.parametrize("sites", ["auto", "leaf"])
@pytest.mark.parametrize("name", ZOO)
def test_true_site_gradients_give_backpropagation(name, sites):
    case = make(name)
    assert_close(oracle(case, sites), gradients(case))


def test_tied_weights_add_up_in_closed_form():
    case = make("tied")
    assert layout_of(case).closed
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
    assert names(case) == ["a", "c"]
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
