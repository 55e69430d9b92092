"""Properties over random shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gradguess as gg
from asserts import assert_jvp_matches_autograd, assert_projector
from frames import covariance, frames_of, slots_of
from models import GUESSES, Case, generator
from references import mlp_jacobians, row_projector, spectral_norms, top_projector

quick = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
sizes = st.integers(1, 9)
activations = st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.Identity])


@st.composite
def networks(draw, dtype=torch.float64) -> Case:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    widths = draw(st.lists(sizes, min_size=2, max_size=4))
    classes, batch, activation = draw(st.integers(2, 6)), draw(st.integers(1, 6)), draw(activations)
    layers: list[nn.Module] = []
    for below, above in zip(widths, [*widths[1:], classes], strict=True):
        layers += [nn.Linear(below, above, bias=draw(st.booleans())), activation()]
    model = nn.Sequential(*layers[:-1]).to(dtype)
    return Case(model, torch.randn(batch, widths[0], dtype=dtype), torch.randint(classes, (batch,)))


@st.composite
def methods(draw):
    k = draw(st.integers(1, 12))
    makers = [
        gg.ActivationPerturbation,
        gg.WTranspose,
        gg.WPreconditioned,
        gg.WeightPerturbation,
        lambda: gg.WPerp(k=k, solver=draw(st.sampled_from(["svd", "subspace", "shared"]))),
        lambda: gg.WPerp(k=k, solver=draw(st.sampled_from(["svd", "subspace", "shared"])), end="bottom"),
        lambda: gg.WPerpNS(k=k),
    ]
    return draw(st.sampled_from(makers))()


@quick
@given(networks(), methods(), st.integers(1, 4), st.booleans())
def test_derivatives_match(case, method, tangents, isolate):
    isolate = isolate and not isinstance(method, gg.WeightPerturbation)
    est = gg.estimate(case.model, method, *case.args, tangents=tangents, isolate=isolate, generator=generator())
    if est.jvp.abs().max() > 0:
        assert_jvp_matches_autograd(case, est, slots_of(case), isolate=isolate)


@quick
@given(networks(), st.integers(1, 12))
def test_svd_and_subspace_agree_with_the_definition(case, k):
    """Where the k-th singular value stands apart; without a gap the subspace is not defined."""
    frames = {s: frames_of(case, gg.WPerp(k=k, solver=s)) for s in ("svd", "subspace")}
    for site, W in mlp_jacobians(case.model, case.inputs).items():
        for b, w in enumerate(W):
            S = torch.linalg.svdvals(w)
            if k < len(S) and S[k - 1] < 1.05 * S[k] + 1e-9 * S[0]:
                continue
            expected = top_projector(w, k)
            for solver, found in frames.items():
                error = spectral_norms(covariance(found[site], w.shape[1])[b] - expected)
                assert error < 1e-6, solver


@quick
@given(
    networks(), st.integers(1, 12), st.sampled_from(["svd", "subspace", "shared"]), st.sampled_from(["top", "bottom"])
)
def test_perpendicular_frames_are_projectors(case, k, solver, end):
    for frame in frames_of(case, gg.WPerp(k=k, solver=solver, end=end)).values():
        if frame.orthonormal:
            P = covariance(frame, frame.apply(torch.zeros(frame.batch, frame.latent, dtype=frame.dtype)).shape[-1])
            assert_projector(P, atol=1e-7)
            assert (P.diagonal(dim1=1, dim2=2).sum(1) < k + 1e-6).all()


@quick
@given(networks())
def test_preconditioning_gives_the_row_space_or_all(case):
    frames = frames_of(case, gg.WPreconditioned())
    for site, W in mlp_jacobians(case.model, case.inputs).items():
        found = covariance(frames[site], W.shape[2])
        for P, w in zip(found, W, strict=True):
            if w.shape[0] >= w.shape[1]:
                torch.testing.assert_close(P, torch.eye(w.shape[1], dtype=w.dtype), rtol=0, atol=1e-9)
            else:
                torch.testing.assert_close(P, row_projector(w), rtol=0, atol=1e-7)


@quick
@given(
    st.sampled_from([torch.float32, torch.bfloat16]).flatmap(networks), methods(), st.sampled_from(["store", "replay"])
)
def test_any_dtype_gives_finite_gradients_of_its_own_kind(case, method, memory):
    loss = gg.ForwardGradient(case.model, method, tangents=2, memory=memory)(*case.args)
    assert loss.isfinite()
    for p in case.model.parameters():
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
        assert p.grad.shape == p.shape
        assert p.grad.isfinite().all()


@quick
@given(networks(), st.integers(0, 2**31))
def test_estimates_are_linear_in_the_loss(case, seed):
    """Twice the loss, twice the estimate, from the same seed: directions know nothing of the loss."""
    for method in (gg.WPerp(k=3), gg.WTranspose(), gg.WeightPerturbation()):
        one = gg.estimate(case.model, method, *case.args, generator=generator(seed))
        two = gg.estimate(
            case.model,
            method,
            lambda o, t: 2 * case.loss_fn(o, t),
            case.inputs,
            case.targets,
            generator=generator(seed),
        )
        for name in one.grads:
            torch.testing.assert_close(two.grads[name], 2 * one.grads[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("guess", GUESSES)
def test_samples_do_not_see_each_other(guess):
    """Without layers that mix: a sample's derivative depends on its own direction alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, t = torch.randn(5, 6).double(), torch.randint(4, (5,))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    est = gg.estimate(model, GUESSES[guess], loss_fn, x, t, generator=generator())
    weights = torch.tensor([1.0, 0, 0, 0, 0]).double()
    if guess == "weight":
        return
    only = gg.estimate(
        model, GUESSES[guess], lambda o, t: weights[: len(o)] * loss_fn(o, t), x, t, generator=generator()
    )
    torch.testing.assert_close(only.jvp[:, 0], est.jvp[:, 0], rtol=0, atol=1e-12)
    assert torch.equal(only.jvp[:, 1:], torch.zeros_like(only.jvp[:, 1:]))
    for site, g in only.site_grads.items():
        torch.testing.assert_close(g[0], est.site_grads[site][0], rtol=0, atol=1e-12)
        assert torch.equal(g[1:], torch.zeros_like(g[1:]))
