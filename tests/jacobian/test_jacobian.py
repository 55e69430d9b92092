"""`W̃`, the Jacobian above a site: closed form, cut graph and explicit matrices agree."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradguess as gg
from asserts import assert_in_subspace
from frames import frames_of, matrix
from gradguess.jacobian import CutGraph
from gradguess.model.site import Site
from gradguess.noise import Noise
from models import BATCH, ZOO, Case, generator, make
from references import mlp_jacobians, row_projector
from steps import layout_of, step_of

MLPS = ["relu-bias", "gelu-bias", "tanh-no-bias", "relu-no-bias", "in-place"]
ACTIVATIONS = [
    nn.ReLU(), nn.LeakyReLU(0.2), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.ELU(0.7),
    nn.SELU(), nn.Softplus(2.0), nn.Hardtanh(-0.5, 0.4), nn.ReLU6(), nn.Mish(), nn.Hardswish(),
    nn.ELU(0.7, inplace=True), nn.LeakyReLU(0.2, inplace=True), nn.ReLU(inplace=True), nn.Identity(),
]  # fmt: skip


def graph_of(case: Case, sites="auto") -> CutGraph:
    return step_of(case, sites=sites).passes.cut()


def w_transpose(case: Case, *, closed: bool) -> dict[str, Tensor]:
    """`W̃ᵀ` of every guessed site, through the engine; with closed forms, or without."""
    layout = layout_of(case)
    if not closed:
        layout = dataclasses.replace(layout, sites=tuple(dataclasses.replace(s, linear=None) for s in layout.sites))
    frames = frames_of(case, gg.WTranspose(), layout=layout)
    return {site.name: matrix(frames[site.name]) for site in layout.sites if not site.top}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_basis_has_all_its_directions_however_few_the_samples(batch):
    """Through a softmax there is no closed form: the basis is sketched, on more vectors where samples are few."""
    torch.manual_seed(0)
    model, k = nn.Sequential(nn.Linear(6, 24), nn.Softmax(-1), nn.Linear(24, 24)).double(), 20
    forward = gg.ForwardGradient(model, gg.WPerp(k=k))
    forward(nn.CrossEntropyLoss(reduction="none"), torch.randn(batch, 6).double(), torch.zeros(batch).long())
    V = forward.kept["0"]["basis"]
    torch.testing.assert_close(V.mT @ V, torch.eye(k).double())


@pytest.mark.parametrize("closed", [True, False], ids=["closed form", "cut graph"])
@pytest.mark.parametrize("name", MLPS)
def test_an_mlps_jacobian_is_weight_times_mask(name, closed):
    case = make(name)
    found, expected = w_transpose(case, closed=closed), mlp_jacobians(case.model, case.inputs)
    assert found.keys() == expected.keys()
    for site in found:
        torch.testing.assert_close(found[site].mT, expected[site], rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gates_are_the_derivatives(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 4)).double()
    case = Case(model, 2 * torch.randn(BATCH, 6).double(), torch.randint(4, (BATCH,)))
    (site, _) = layout_of(case).sites
    assert site.linear is model[2]
    torch.testing.assert_close(
        w_transpose(case, closed=True)["0"].mT, mlp_jacobians(model, case.inputs)["0"], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("name", [name for name in ZOO if name != "batch-norm"])  # that mixes samples
def test_products_are_those_of_the_matrix(name):
    """jvp and vjp are adjoint, and both are the dense matrix."""
    graph = graph_of(make(name), "leaf")
    for site in graph.layout.sites:
        if site.top or site.batch_dim is None:
            continue
        W = graph.jacobian(site)
        dense = W.matrix()
        assert dense.shape == (W.batch, W.m, W.d)
        v = torch.randn(2, W.batch, W.d, dtype=dense.dtype)
        eps = torch.randn(2, W.batch, W.m, dtype=dense.dtype)
        torch.testing.assert_close(W.jvp(v), torch.einsum("bmd,nbd->nbm", dense, v), rtol=0, atol=1e-11)
        torch.testing.assert_close(W.vjp(eps), torch.einsum("bmd,nbm->nbd", dense, eps), rtol=0, atol=1e-11)
        assert dense.abs().max() > 0


def test_sketched_basis_finds_a_low_rank_row_space():
    """Where all samples share a row space of dimension k, the sketch must find exactly that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.0), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 4)).double()
    case = Case(model, torch.randn(BATCH, 6).double(), torch.randint(4, (BATCH,)))
    graph = graph_of(case)
    assert graph.layout["0"].linear is None or model[1].p == 0
    V = graph.jacobian(graph.layout["0"]).shared_basis(3, Noise(generator()))
    P = row_projector(model[2].weight.detach())
    assert_in_subspace(V.mT, P)
    torch.testing.assert_close(V @ V.mT, P, rtol=0, atol=1e-9)


@pytest.mark.parametrize("depth", [3, 12])
def test_a_graph_that_settles_frees_what_no_site_waits_for(depth):
    """Of a network in pieces one piece is alive at a time, whatever the depth."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(5, 5), nn.Softmax(-1))]
    model, x = nn.Sequential(nn.Linear(6, 5), *layers).double(), torch.randn(BATCH, 6).double()
    step, alive, outputs = step_of(Case(model, x, torch.zeros(BATCH).long())), [], weakref.WeakSet()

    def settle(graph: CutGraph, met: list[Site]) -> None:
        outputs.update(graph.below.values())
        alive.append((len(graph.below), len(graph.above), len(outputs)))

    graph = CutGraph(step.layout, sites=step.layout.guessed, settle=settle)
    graph.end(*step.passes.graph(graph.visit, twice=True))
    assert alive == [(1, 2, 1)] * (depth - 1) + [(1, 1, 1)]
    assert not outputs


class Rewired(nn.Module):
    """The same calls for every batch, but what they are given depends on its sign."""

    def __init__(self, *, past: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.past = past

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x), self.b(x)
        if x.mean() > 0 and not self.past:
            u, v = v, u
        y = self.c(u.softmax(-1)).softmax(-1) + v.softmax(-1)
        return self.d(y + u.sin() if x.mean() > 0 and self.past else y)


@pytest.mark.parametrize("past", [False, True], ids=["swapped", "past a layer"])
def test_a_search_sees_that_a_model_is_wired_in_another_way(past):
    torch.manual_seed(0)
    model, x, t = Rewired(past=past).double(), torch.rand(BATCH, 6).double(), torch.zeros(BATCH).long()
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    moved, fresh = (gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites="leaf") for _ in range(2))
    for forward, batches in ((moved, (-x, x)), (fresh, (x, x))):
        for batch in batches:
            forward(loss_fn, batch, t)
    above = [{site.name: site.above for site in forward.layout.sites} for forward in (moved, fresh)]
    assert above[0] == above[1]


def test_a_search_passes_through_a_checkpoint():
    """It computes the layers of the checkpoint again while the pass is under way: no calls of the model's own."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def bases(kind: type[nn.Sequential]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        inner = kind(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Softmax(-1))
        forward = gg.ForwardGradient(nn.Sequential(inner, nn.Linear(8, 3)).double(), gg.WPerp(k=2))
        forward(nn.CrossEntropyLoss(reduction="none"), torch.randn(BATCH, 6).double(), torch.zeros(BATCH).long())
        return {name: kept["basis"] for name, kept in forward.kept.items()}

    torch.testing.assert_close(bases(Checkpointed), bases(nn.Sequential))
