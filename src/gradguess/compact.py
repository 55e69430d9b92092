"""Every sample's Jacobian on its open units alone.

A ReLU closes about half of the units of a layer, and a closed unit is a zero column of `W̃ = W D`. With `a` open units
the Gram matrix `W̃ᵀW̃` is `a × a`, and it is not computed but read off: `D WᵀW D` is a part of one matrix that all
samples share. Products of such matrices cost `(a/d)³` of the full ones, an eighth for half of the units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess import kernels
from gradguess.upstream import ClosedForm

ROUND = 8  # sizes are multiples of this: kernels like that


class Compact:
    """`W̃` of a layer with a gate, on the units that the gate lets through. Waits for the device.

    Attributes:
        index: (batch, a), the open units of each sample; where a sample has fewer, closed ones fill up.
        gate: (batch, a), the gate there: zero where filled up.
    """

    def __init__(self, W: ClosedForm) -> None:
        assert W.gate is not None
        self.W = W
        open_ = W.gate != 0
        most = int(open_.sum(1).max())
        self.size = min(W.d, max(1, -(-most // ROUND)) * ROUND)
        self.index = torch.argsort(open_.byte(), dim=1, descending=True, stable=True)[:, : self.size]
        self.gate = W.gate.gather(1, self.index)

    def gram(self, scale: float | Tensor = 1.0) -> Tensor:
        """`W̃ᵀ W̃ / scale²`, (batch, a, a); `scale` may be (batch, 1)."""
        gate = self.gate / scale
        if kernels.usable(gate):
            return kernels.gram(self.W.product, self.index, gate)
        places = self.index[:, :, None] * self.W.d + self.index[:, None, :]
        return self.W.product.view(-1)[places].mul_(gate[:, :, None]).mul_(gate[:, None, :])

    def gather(self, v: Tensor) -> Tensor:
        """(..., batch, d) -> (..., batch, a)."""
        return v.gather(-1, self.index.expand(*v.shape[:-1], -1))

    def scatter(self, u: Tensor) -> Tensor:
        """(..., batch, a) -> (..., batch, d), zero at what was left out."""
        v = u.new_zeros(*u.shape[:-1], self.W.d)
        return v.scatter_(-1, self.index.expand_as(u), u)
