"""A Jacobian on its open units alone, against the whole of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.compact import SHARE, TILE, Compact, groups
from gradguess.guesses import perp
from gradguess.guesses._base import Grouped
from gradguess.guesses.perp_ns import Polynomial
from gradguess.linalg import newton_schulz
from gradguess.newton_schulz import coefficients
from gradguess.noise import Noise
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
    small, scale = Compact.of(W), torch.linspace(1, 2, 6, dtype=F64)[:, None]
    whole = W.matrix().mT @ W.matrix() / scale[..., None].square()
    for b, index in enumerate(small.index):
        torch.testing.assert_close(small.gram(scale)[b], whole[b][index][:, index])


def test_it_is_as_small_as_the_open_units_allow():
    W = jacobians()
    assert Compact.of(W).size == 30  # one sample is wholly open
    assert W.gate is not None
    assert Compact.of(ClosedForm(W.weight, W.gate[3:])).size == 24 >= int((W.gate[3:] != 0).sum(1).max())
    assert Compact.of(ClosedForm(W.weight, W.gate[:1])).size == 8  # none is open


def test_gather_and_scatter_are_each_others_adjoint():
    small = Compact.of(ClosedForm(jacobians().weight, (noise(6, 30, seed=4) > 0.5).to(F64)))
    v, u = noise(2, 6, 30, seed=5), noise(2, 6, small.size, seed=6)
    torch.testing.assert_close((small.gather(v) * u).sum(), (v * small.scatter(u)).sum())


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_polynomial_is_that_of_the_dense_matrix(steps):
    W = jacobians()
    scale = torch.linalg.matrix_norm(W.matrix(), 2).clamp_min(1e-3) * 1.1
    a = torch.tensor(coefficients(0.4), dtype=F64)
    dense = newton_schulz(W.matrix() / scale[:, None, None], a, steps)  # p^N(W̃/σ), (batch, m, d)
    frame = Polynomial(W, Compact.of(W), scale, tuple(a.tolist()), steps)
    z, v = noise(3, 6, 40, seed=7), noise(3, 6, 30, seed=8)
    torch.testing.assert_close(frame.apply(z), torch.einsum("bmd,nbm->nbd", dense, z))
    torch.testing.assert_close(frame.adjoint(v), torch.einsum("bmd,nbd->nbm", dense, v))
    torch.testing.assert_close(frame.apply(z[0]), torch.einsum("bmd,bm->bd", dense, z[0]))


@pytest.mark.parametrize(
    ("d", "spread", "careful"),
    [(96, 1.0, True), (128, 3.0, True), (320, 1.0, False), (320, 10.0, False), (320, 20.0, True)],
)
def test_the_subspace_of_open_units_is_that_of_the_svd(d, spread, careful):
    """What a GPU does for `solver="subspace"`, here in float32 on a CPU: nine in ten projectors within 1e-2.

    Where the tenth and the eleventh singular value of a sample nearly agree, any method mixes their vectors.
    """
    k = 10
    generator = torch.Generator().manual_seed(0)
    W = (2 * torch.rand(d, d, generator=generator) - 1) / d**0.5
    W += (spread - 1) * torch.outer(*torch.randn(2, d, generator=generator)) / d
    upstream = ClosedForm(W, (torch.rand(16, d, generator=generator) < 0.5).float())
    start = upstream.shared_basis(perp.GPU_BLOCK, Noise(generator))
    steep = bool(perp._steep(upstream, start, k))
    assert steep == careful
    found = perp._by_open_units(upstream, start, k, steep).double()
    exact = perp._top_of(upstream.matrix().double(), k)
    error = torch.linalg.matrix_norm(found @ found.mT - exact @ exact.mT, 2)
    assert error.median() < 5e-3
    assert error.quantile(0.9) < 1e-2


def test_samples_with_few_open_units_go_together():
    d, batch = 300, 200
    gate = torch.rand(batch, d, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.2, 0.6, batch)[:, None]
    W = ClosedForm(noise(310, d), gate.to(F64))
    parts = groups(W)
    assert [len(rows) % SHARE == 0 for rows, _ in parts] == [True, False]
    assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(range(batch))
    for rows, small in parts:
        whole = ClosedForm(W.weight, gate[rows].to(F64))
        assert torch.equal(small.scatter(small.gate), whole.gate)
        assert small.product is W.product
    assert parts[0][1].size <= TILE < parts[1][1].size
    assert len(groups(ClosedForm(W.weight, gate[:1].to(F64)))) == 1


def test_a_frame_of_groups_is_each_of_them_in_its_place():
    W = jacobians()
    scale, a = torch.linspace(1, 2, 6, dtype=F64), (2.0, -1.5, 0.5, 0.1)
    whole = Polynomial(W, Compact.of(W), scale, a, 3)
    rows = [torch.tensor([4, 0, 2]), torch.tensor([1, 5, 3])]
    part = [ClosedForm(W.weight, W.gate[places]) for places in rows]
    frame = Grouped(
        [(places, Polynomial(w, Compact.of(w), scale[places], a, 3)) for places, w in zip(rows, part, strict=True)]
    )
    z, v = noise(2, 6, 40, seed=7), noise(6, 30, seed=8)
    torch.testing.assert_close(frame.apply(z), whole.apply(z))
    torch.testing.assert_close(frame.adjoint(v), whole.adjoint(v))
    assert (frame.batch, frame.latent, frame.dtype) == (whole.batch, whole.latent, whole.dtype)
