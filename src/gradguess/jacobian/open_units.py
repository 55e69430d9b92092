"""Every sample's Jacobian on its open units alone.

A ReLU closes about half of the units of a layer, and a closed unit is a zero column of `W̃ = W D`. With `a` open units
the Gram matrix `W̃ᵀW̃` is `a × a`, and it is not computed but read off: `D WᵀW D` is a part of one matrix that all
samples share. Products of such matrices cost `(a/d)³` of the full ones, an eighth for half of the units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.jacobian.gated_linear import GatedLinear

STEP = 8  # sizes are multiples of this
TILE = 128  # a GPU makes products in tiles of this size, so a matrix costs as much as the next multiple of it
SHARE = 64  # the first group's number of samples is a multiple of this


@dataclass(frozen=True)
class OpenUnits:
    """`W̃` of a layer with a gate, on the units that the gate lets through.

    Attributes:
        product: (d, d), `WᵀW`.
        index: (batch, a), the open units of each sample; where a sample has fewer, closed ones fill up.
        gate: (batch, a), the gate there: zero where filled up.
    """

    product: Tensor
    index: Tensor
    gate: Tensor

    @classmethod
    def of(cls, product: Tensor, gate: Tensor) -> OpenUnits:
        """From `WᵀW` and the gate of every sample, (batch, d): as large as the sample with the most open units needs.

        Waits for the device.
        """
        most = int((gate != 0).sum(1).max())
        size = min(gate.shape[1], max(1, -(-most // STEP)) * STEP)
        index = torch.argsort((gate != 0).byte(), dim=1, descending=True, stable=True)[:, :size].contiguous()
        return cls(product, index, gate.gather(1, index))

    @property
    def size(self) -> int:
        return self.index.shape[1]

    def gram(self, scale: float | Tensor = 1.0) -> Tensor:
        """`W̃ᵀ W̃ / scale²`, (batch, a, a); `scale` may be (batch, 1)."""
        gate = self.gate / scale
        places = self.index[:, :, None] * len(self.product) + self.index[:, None, :]
        return self.product.reshape(-1)[places].mul_(gate[:, :, None]).mul_(gate[:, None, :])

    def gather(self, v: Tensor) -> Tensor:
        """(..., batch, d) -> (..., batch, a)."""
        return v.gather(-1, self.index.expand(*v.shape[:-1], -1))

    def scatter(self, u: Tensor) -> Tensor:
        """(..., batch, a) -> (..., batch, d), zero at what was left out."""
        v = u.new_zeros(*u.shape[:-1], len(self.product))
        return v.scatter_(-1, self.index.expand_as(u), u)


def groups(W: GatedLinear) -> list[tuple[Tensor, OpenUnits]]:
    """The samples with few open units, and the others: for each group its places in the batch and its `OpenUnits`.

    The matrices of a group are as small as its samples allow, since a GPU makes products in whole tiles. Waits for the
    device.
    """
    assert W.gate is not None
    counts = (W.gate != 0).sum(1).tolist()
    edge = (max(counts) - 1) // TILE * TILE
    few = [b for b, count in enumerate(counts) if count <= edge]
    few = few[: len(few) // SHARE * SHARE]
    rest = sorted(set(range(len(counts))) - set(few))
    parts = []
    for places in (few, rest):
        if places:
            rows = torch.tensor(places, device=W.gate.device)
            parts.append((rows, OpenUnits.of(W.product, W.gate[rows])))
    return parts
