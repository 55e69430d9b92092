"""Which sites a model has, and what lies above and below each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from asserts import assert_close
from models import BATCH, CLASSES, INPUTS, Case, cross_entropy, generator, make
from references import gradients
from steps import layout_of, oracle


def names(case: Case, sites="auto") -> list[str]:
    return [site.name for site in layout_of(case, sites).sites]


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


class Patches(nn.Module):
    """An embedding with parameters of its own around a layer."""

    def __init__(self, use: str):
        super().__init__()
        self.embed, self.use = nn.Linear(4, 6), use
        self.position = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        embedded = self.embed(x)
        return {"add": embedded + self.position, "scale": embedded * self.position, "none": embedded}[self.use]


class Scaled(nn.Module):
    """A block with a scale of its own: its output has two sites below it."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.scale = nn.LayerNorm(6), nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x + self.scale * self.inner(self.norm(x))


@pytest.mark.parametrize(("use", "first"), [("add", "0"), ("scale", "0"), ("none", "0.embed")])
def test_an_embedding_with_positions_is_one_site(use, first):
    """Otherwise its positions would be used above the site, by every branch."""
    torch.manual_seed(0)
    model = nn.Sequential(Patches(use), Scaled(), Scaled(), nn.Flatten(), nn.Linear(30, 3)).double()
    case = Case(model, torch.randn(BATCH, 5, 4).double(), torch.randint(3, (BATCH,)))
    assert names(case) == [first, "1.inner", "2.inner", "4"]
    positions = {"0.position"} if use != "none" else set()
    assert set(layout_of(case)[first].parameters) == {"0.embed.weight", "0.embed.bias"} | positions
    assert all("0.position" not in layout_of(case)[name].parameters for name in names(case)[1:])
    assert names(case, "leaf")[0] == "0.embed"
    assert_close(oracle(case), gradients(case))


def test_a_model_with_a_temperature_has_its_top_at_the_last_layer():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 3))
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.body(x) * self.temperature

    torch.manual_seed(0)
    case = Case(Root().double(), torch.randn(BATCH, 6).double(), torch.randint(3, (BATCH,)))
    assert names(case) == ["body.0", "body.1.inner", "body.2"]
    assert layout_of(case).tail == ("temperature",)


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


def test_parameters_between_the_sites_are_found():
    layout = layout_of(make("bare"))
    assert layout["first"].parameters == ("below", "first.weight", "first.bias")
    assert layout["last"].parameters == ("token", "a", "b", "last.weight", "last.bias")
    assert layout.tail == ("scale",)
    assert layout.needs_graph


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


class Skipping(nn.Module):
    """Blocks with shortcuts, of which each step leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(INPUTS, 6), nn.Linear(6, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("sites", ["auto", "leaf", 2])
@pytest.mark.parametrize("memory", ["store", "replay"])
def test_a_model_may_leave_layers_out_at_random(sites, memory):
    """Sites are found with the random numbers of the step itself."""
    model, x = Skipping().double(), torch.randn(BATCH, INPUTS, dtype=torch.float64)
    args = cross_entropy, x, torch.randint(CLASSES, (BATCH,))
    forward = gg.ForwardGradient(model, gg.Backprop(), sites=sites, memory=memory)
    for seed in range(20):
        torch.manual_seed(seed)
        expected = torch.autograd.grad(args[0](model(x), args[2]).mean(), model.first.weight)[0]
        torch.manual_seed(seed)
        model.zero_grad()
        forward(*args)
        torch.testing.assert_close(model.first.weight.grad, expected)
        torch.manual_seed(seed)
        est = gg.estimate(model, gg.ActivationPerturbation(), *args, sites=sites)
        torch.manual_seed(seed)
        assert torch.equal(est.losses, args[0](model(x), args[2]))
