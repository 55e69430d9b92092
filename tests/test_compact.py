"""A Jacobian on its open units alone, against the whole of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.compact import Compact
from gradguess.guesses import perp
from gradguess.guesses.perp_ns import Polynomial
from gradguess.linalg import newton_schulz
from gradguess.newton_schulz import coefficients
from gradguess.upstream import ClosedForm

F64 = torch.float64


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def jacobians(m: int = 40, d: int = 30, batch: int = 6) -> ClosedForm:
    """Gates of a ReLU and of something smoother; a sample with all units closed and one with all open."""
    gate = (noise(batch, d, seed=1) > 0).to(F64)
    gate[2] *= noise(d, seed=2).abs()
    gate[0], gate[1] = 0, 1
    return ClosedForm(noise(m, d) / d**0.5, gate)


def test_its_gram_matrix_is_that_of_the_open_columns():
    W = jacobians()
    small, scale = Compact(W), torch.linspace(1, 2, 6, dtype=F64)[:, None]
    whole = W.matrix().mT @ W.matrix() / scale[..., None].square()
    for b, index in enumerate(small.index):
        torch.testing.assert_close(small.gram(scale)[b], whole[b][index][:, index])


def test_it_is_as_small_as_the_open_units_allow():
    W = jacobians()
    assert Compact(W).size == 30  # one sample is wholly open
    assert W.gate is not None
    assert Compact(ClosedForm(W.weight, W.gate[3:])).size == 24 >= int((W.gate[3:] != 0).sum(1).max())
    assert Compact(ClosedForm(W.weight, W.gate[:1])).size == 8  # none is open


def test_gather_and_scatter_are_each_others_adjoint():
    small = Compact(ClosedForm(jacobians().weight, (noise(6, 30, seed=4) > 0.5).to(F64)))
    v, u = noise(2, 6, 30, seed=5), noise(2, 6, small.size, seed=6)
    torch.testing.assert_close((small.gather(v) * u).sum(), (v * small.scatter(u)).sum())


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_polynomial_is_that_of_the_dense_matrix(steps):
    W = jacobians()
    scale = torch.linalg.matrix_norm(W.matrix(), 2).clamp_min(1e-3) * 1.1
    a = torch.tensor(coefficients(0.4), dtype=F64)
    dense = newton_schulz(W.matrix() / scale[:, None, None], a, steps)  # p^N(W̃/σ), (batch, m, d)
    frame = Polynomial(Compact(W), scale, a, steps)
    z, v = noise(3, 6, 40, seed=7), noise(3, 6, 30, seed=8)
    torch.testing.assert_close(frame.apply(z), torch.einsum("bmd,nbm->nbd", dense, z))
    torch.testing.assert_close(frame.adjoint(v), torch.einsum("bmd,nbd->nbm", dense, v))
    torch.testing.assert_close(frame.apply(z[0]), torch.einsum("bmd,bm->bd", dense, z[0]))


@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_the_subspace_of_open_units_is_that_of_the_svd(spread):
    """What a GPU does for `solver="subspace"`, here in float32 on a CPU: nine in ten projectors within 1e-2.

    Where the tenth and the eleventh singular value of a sample nearly agree, any method mixes their vectors.
    """
    d, k = 256, 10
    generator = torch.Generator().manual_seed(0)
    W = (2 * torch.rand(d, d, generator=generator) - 1) / d**0.5
    W += (spread - 1) * torch.outer(*torch.randn(2, d, generator=generator)) / d
    upstream = ClosedForm(W, (torch.rand(16, d, generator=generator) < 0.5).float())
    frame = perp._on_open_units(Compact(upstream), torch.randn(d, perp.GPU_BLOCK, generator=generator), k)
    exact = perp._top_of(upstream.matrix().double(), k)
    found = frame.Q.double()
    error = torch.linalg.matrix_norm(found @ found.mT - exact @ exact.mT, 2)
    assert error.median() < 3e-3
    assert error.quantile(0.9) < 1e-2
