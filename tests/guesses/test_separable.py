"""W⊥ with one basis of positions and one of features: its law, and gradients from factors against dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_covariance, assert_projector, assert_unbiased
from frames import covariance, frames_of
from gradguess.guesses.base import SiteView
from gradguess.guesses.frames import Separable
from gradguess.jacobian import Dense
from gradguess.layers.positions import Pattern
from gradguess.step.measure import Drawing, measure
from models import Case, generator, make
from references import sample_gradients
from steps import step_of

WPERP = gg.WPerp(k=6, solver="separable")
TANGENTS = {"one": {}, "several": {"tangents": 3}, "apart": {"isolate": True}, "balanced": {"balance": True}}


def sequences(batch: int = 5) -> Case:
    """Layers whose gradients fold, of every kind, and one (an embedding) whose gradient does not."""
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.RMSNorm(12)]
    model = nn.Sequential(*layers, nn.Linear(12, 6, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(30, 4)).double()
    return Case(model, torch.randint(9, (batch, 5)), torch.randint(4, (batch,)))


def dense_gradients(case: Case, site_grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's own vjp of the estimate at its output."""
    inputs: dict[str, Tensor] = {}
    for name, module in case.model.named_children():
        module.register_forward_hook(lambda module, args, out, name=name: inputs.update({name: args[0].detach()}))
    case.outputs()
    found = {}
    for name, g in site_grads.items():
        module = case.model.get_submodule(name)
        own = dict(module.named_parameters())
        grads = torch.autograd.grad(module(inputs[name]), list(own.values()), g / len(g))
        found |= {f"{name}.{key}": grad for key, grad in zip(own, grads, strict=True)}
    return found


@pytest.mark.parametrize("options", TANGENTS)
@pytest.mark.parametrize("top", ["guess", "exact"])
def test_gradients_from_factors_are_the_dense_ones(options, top):
    case = sequences()
    est = gg.estimate(case.model, WPERP, *case.args, top=top, generator=generator(1), **TANGENTS[options])
    for name, g in dense_gradients(case, est.site_grads).items():
        torch.testing.assert_close(est.grads[name], g, rtol=1e-10, atol=1e-14)
    if options == "several":
        for name in ("1", "2", "4", "5"):
            mean = (est.jvp[:, :, None, None] * est.directions[name]).mean(0)
            torch.testing.assert_close(est.site_grads[name], mean, rtol=1e-10, atol=1e-14)


def test_norms_over_positions_have_the_dense_gradients_as_well():
    """Two positions, and two columns in `P`: rows of the factors have the shape of the weight, and are not its rows."""
    torch.manual_seed(0)
    layers = [nn.LayerNorm((2, 6)), nn.Linear(6, 6), nn.Tanh(), nn.RMSNorm((2, 6)), nn.Flatten(), nn.Linear(12, 4)]
    case = Case(nn.Sequential(*layers).double(), torch.randn(5, 2, 6).double(), torch.randint(4, (5,)))
    est = gg.estimate(case.model, WPERP, *case.args, generator=generator(1))
    for name, g in dense_gradients(case, est.site_grads).items():
        torch.testing.assert_close(est.grads[name], g, rtol=1e-10, atol=1e-14)


def test_sequences_may_have_another_length_when_the_next_search_is_due():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 6), nn.AdaptiveAvgPool2d((1, 6)), nn.Flatten())
    forward = gg.ForwardGradient(model.double(), gg.WPerp(k=4, solver="separable", refresh=1), seed=3)
    for positions in (6, 9, 4):
        forward(nn.CrossEntropyLoss(reduction="none"), torch.randn(4, positions, 3).double(), torch.randint(6, (4,)))
        assert forward.kept["0"]["positions"].shape == (positions, 2)
        assert_projector(forward.kept["0"]["features"] @ forward.kept["0"]["features"].T, 2)


@pytest.mark.parametrize("options", [{"memory": "replay"}, {"chunk": 2}, {"compile": True}, {"derivative": "finite"}])
def test_every_way_to_run_a_step_gives_the_same(options):
    case, found = sequences(), []
    for one in ({}, options):
        forward = gg.ForwardGradient(case.model, WPERP, seed=3, **one)
        for _ in range(3):
            case.model.zero_grad()
            forward(case.loss_fn, case.inputs, case.targets)
        found.append([p.grad for p in case.model.parameters()])
    rtol = 1e-4 if "derivative" in options else 1e-9
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(a.abs().max()))


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_covariance_is_a_product_of_projectors(name):
    """Zero columns are those that a site lacks: where the outputs are a mean over positions, `P` has one."""
    case = make(name)
    frames = {site: frame for site, frame in frames_of(case, WPERP).items() if isinstance(frame, Separable)}
    assert frames
    for frame in frames.values():
        P, V, pattern = frame.P, frame.V, frame.pattern
        C = covariance(frame, len(P) * len(V))
        assert_projector(C, int(P.any(0).sum() * V.any(0).sum()))
        product = torch.kron(V @ V.T, P @ P.T) if pattern.channels_first else torch.kron(P @ P.T, V @ V.T)
        torch.testing.assert_close(C, product.expand_as(C), rtol=0, atol=1e-12)


def test_bases_are_the_top_of_the_unfoldings_each_inside_of_the_other():
    """Two positions and three features matter. A fourth feature is the strongest, but at all seven positions alike."""

    def top(rows: Tensor, k: int) -> Tensor:
        return torch.linalg.svd(rows.flatten(0, 1))[2][:k].T

    torch.manual_seed(0)
    rows = 0.01 * torch.randn(400, 7, 11).double()
    rows[:, :2, :3] += 3 * torch.randn(400, 2, 3)
    rows[:, :, 3] += 2 * torch.randn(400, 7)
    found: dict[str, Tensor] = {}
    for _ in range(3):  # from nothing, then brought up to date
        found = WPERP.search(_view(rows, found))
        P, V = found["positions"], found["features"]
        assert (P.shape, V.shape) == ((7, 2), (11, 3))
        for basis, twin in ((P, top((rows @ V).mT, 2)), (V, top(P.T @ rows, 3))):
            torch.testing.assert_close(basis @ basis.T, twin @ twin.T, rtol=0, atol=0.02)
        torch.testing.assert_close(V[3].norm(), V.new_zeros(()), rtol=0, atol=0.1)


def _view(rows: Tensor, kept: dict[str, Tensor]) -> SiteView:
    flat = rows.flatten(1)
    return SiteView("site", flat, None, False, kept, None, lambda: Dense(flat[None]), Pattern("full", rows.shape[2]))


@pytest.mark.parametrize(("shape", "sizes"), [((9, 2), (3, 2)), ((2, 9), (2, 3)), ((9, 9), (2, 3)), ((1, 9), (1, 6))])
def test_no_part_of_k_is_left_where_features_or_positions_are_few(shape, sizes):
    found = WPERP.search(_view(torch.randn(50, *shape).double(), {}))
    assert (found["positions"].shape[1], found["features"].shape[1]) == sizes


def test_law_of_draws():
    """20,000 draws at one point: covariance as the frame says, E[ĝ] = Cov g. Entrywise, 5 standard errors."""
    case = sequences(1)
    case = Case(case.model, case.inputs.repeat(20_000, 1), case.targets.repeat(20_000))
    est = gg.estimate(case.model, WPERP, *case.args, generator=generator(1))
    one = Case(case.model, case.inputs[:1], case.targets[:1])
    g = sample_gradients(one, est.directions)
    frames = {site: frame for site, frame in frames_of(case, WPERP).items() if isinstance(frame, Separable)}
    assert len(frames) == 5
    for site, frame in frames.items():
        y = est.directions[site][0].flatten(1)
        frame.batch = 1
        C = covariance(frame, y.shape[1])[0]
        assert_covariance(y, C)
        assert_unbiased(est.site_grads[site].flatten(1), C @ g[site][0, 0].flatten())


def test_what_a_step_keeps_does_not_grow_with_the_positions():
    case = sequences()
    seen = measure(Drawing(step_of(case, WPERP), WPERP))
    assert {name for name, record in seen.records.items() if record.x is None} == {"1", "2", "4", "5"}


def test_the_weakest_directions_are_not_separable():
    with pytest.raises(gg.InputError, match="end='top'"):
        gg.WPerp(solver="separable", end="bottom")
