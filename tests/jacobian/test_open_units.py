"""A Jacobian on its open units alone, against the whole of it."""

from __future__ import annotations

import torch

from gradguess.jacobian import GatedLinear
from gradguess.jacobian.open_units import SHARE, TILE, OpenUnits, groups
from matrices import F64, gated_jacobians, noise


def test_its_gram_matrix_is_that_of_the_open_columns():
    W = gated_jacobians()
    small, scale = OpenUnits.of(W.product, W.gate), torch.linspace(1, 2, 6, dtype=F64)[:, None]
    whole = W.matrix().mT @ W.matrix() / scale[..., None].square()
    for b, index in enumerate(small.index):
        torch.testing.assert_close(small.gram(scale)[b], whole[b][index][:, index])


def test_samples_with_few_open_units_go_together():
    d, batch = 300, 200
    gate = torch.rand(batch, d, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.2, 0.6, batch)[:, None]
    W = GatedLinear(noise(310, d), gate.to(F64))
    parts = groups(W)
    assert [len(rows) % SHARE == 0 for rows, _ in parts] == [True, False]
    assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(range(batch))
    for rows, small in parts:
        whole = GatedLinear(W.weight, gate[rows].to(F64))
        assert torch.equal(small.scatter(small.gate), whole.gate)
        assert small.product is W.product
    assert parts[0][1].size <= TILE < parts[1][1].size
    assert len(groups(GatedLinear(W.weight, gate[:1].to(F64)))) == 1
