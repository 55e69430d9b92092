"""The frames of W⊥ and W⊥-NS for each sample of its own, against dense matrices."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from frames import covariance
from gradguess.guesses import SiteView, perp
from gradguess.guesses.perp_ns import Polynomial
from gradguess.jacobian import Dense, GatedLinear
from gradguess.linalg.step_polynomials import nearest
from gradguess.noise import Noise
from matrices import F64, gated_jacobians, noise


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("kind", ["open units", "fewer outputs", "a wide matrix for each", "a tall matrix for each"])
def test_the_polynomial_is_that_of_the_singular_values(kind, steps):
    W = gated_jacobians(m=6 if kind == "fewer outputs" else 40)
    if kind.endswith("for each"):
        W = Dense(noise(6, *((7, 30) if "wide" in kind else (40, 9))))
    scale = torch.linalg.matrix_norm(W.matrix(), 2).clamp_min(1e-3) * 1.1
    a = nearest(0.4).coefficients
    U, S, Vh = torch.linalg.svd(W.matrix() / scale[:, None, None], full_matrices=False)
    for _ in range(steps):
        S = a[0] * S + a[1] * S**3 + a[2] * S**5 + a[3] * S**7
    dense = U @ torch.diag_embed(S) @ Vh  # p^N(W̃/σ), (batch, m, d)
    frame = Polynomial(W, scale, a, steps)
    assert (frame.units is None) == (kind in ("fewer outputs", "a wide matrix for each"))
    z, v = noise(3, 6, W.m, seed=7), noise(3, 6, W.d, seed=8)
    torch.testing.assert_close(frame.apply(z), torch.einsum("bmd,nbm->nbd", dense, z))
    torch.testing.assert_close(frame.adjoint(v), torch.einsum("bmd,nbd->nbm", dense, v))
    torch.testing.assert_close(frame.apply(z[0]), torch.einsum("bmd,bm->bd", dense, z[0]))


@pytest.mark.parametrize(("d", "spread"), [(96, 1.0), (128, 3.0), (320, 1.0), (320, 20.0)])
def test_the_subspace_is_that_of_the_svd(d, spread):
    """In float32, also under one singular value far above the others: nine in ten projectors within 1e-2.

    Where the tenth and the eleventh singular value of a sample nearly agree, any method mixes their vectors.
    """
    k = 10
    generator = torch.Generator().manual_seed(0)
    W = (2 * torch.rand(d, d, generator=generator) - 1) / d**0.5
    W += (spread - 1) * torch.outer(*torch.randn(2, d, generator=generator)) / d
    W = GatedLinear(W, (torch.rand(16, d, generator=generator) < 0.5).float())
    guess, source = gg.WPerp(k, solver="subspace"), Noise(generator)
    kept = guess.search(SiteView("site", W.gate, W.gate, True, {}, source, lambda: W))
    found = guess.frame(SiteView("site", W.gate, W.gate, True, kept, source, lambda: W)).Q.double()
    exact = perp._top_of(W.matrix().double(), k)
    error = torch.linalg.matrix_norm(found @ found.mT - exact @ exact.mT, 2)
    assert error.median() < 5e-3
    assert error.quantile(0.9) < 1e-2


@pytest.mark.parametrize("rank", [24, 20])
def test_all_directions_are_those_of_the_open_units(rank):
    """k = d: whatever the solver, the projector is that on the row space; at full rank the gate alone decides."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, rank, generator=generator, dtype=F64) @ torch.randn(
        rank, 24, generator=generator, dtype=F64
    )
    W = GatedLinear(weight, (torch.rand(9, 24, generator=generator) < 0.5).double())
    found = {}
    for solver in ("subspace", "shared", "svd"):
        guess, source = gg.WPerp(24, solver=solver), Noise(generator)
        kept = guess.search(SiteView("site", W.gate, W.gate, True, {}, source, lambda: W))
        found[solver] = covariance(guess.frame(SiteView("site", W.gate, W.gate, True, kept, source, lambda: W)), 24)
    torch.testing.assert_close(found["subspace"], found["svd"])
    torch.testing.assert_close(found["shared"], found["svd"])
