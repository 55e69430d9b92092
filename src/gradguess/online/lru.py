"""A linear recurrent unit: complex numbers that turn and fade, each by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class LRU(nn.Module):
    """`z_t = λ z_{t-1} + γ (B x_t)` with complex λ, element by element; the output is (Re z, Im z).

    `λ = exp(-exp(ν) + i exp(φ))` lies inside the unit circle for every ν, and `γ = √(1 - |λ|²)` keeps the state's
    size. No unit sees another, so that `RTRL()` is exact at about the price of the step itself.

    Args:
        inputs: numbers in x.
        units: complex units; the output and the state have twice as many numbers.
        radius: |λ| at the start is uniform (in the disc) between these two.
        phase: the largest angle of λ at the start.

    Reference: Orvieto et al. 2023 (LRU), Elelimy et al. 2024 (RTU), Zucchet et al. 2023 (learning it online).
    """

    elementwise = True

    def __init__(
        self, inputs: int, units: int, radius: tuple[float, float] = (0.5, 0.99), phase: float = math.pi
    ) -> None:
        super().__init__()
        low, high = radius
        modulus = torch.sqrt(torch.rand(units) * (high**2 - low**2) + low**2)
        self.nu = nn.Parameter(torch.log(-torch.log(modulus)))
        self.phi = nn.Parameter(torch.log(phase * torch.rand(units).clamp_min(1e-3)))
        self.real = nn.Parameter(torch.randn(units, inputs) / math.sqrt(2 * inputs))
        self.imaginary = nn.Parameter(torch.randn(units, inputs) / math.sqrt(2 * inputs))

    def initial_state(self, streams: int) -> Tensor:
        """Zeros, (streams, 2 units)."""
        return self.nu.new_zeros(streams, 2 * len(self.nu)).detach()

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One step of all streams: the new state twice, since it is the output as well.

        Args:
            x: the input of each stream, (streams, inputs).
            state: what the step before returned, (streams, 2 units); None starts anew.
        """
        u, v = (self.initial_state(x.shape[0]) if state is None else state).chunk(2, 1)
        modulus, angle = torch.exp(-torch.exp(self.nu)), torch.exp(self.phi)
        a, b = modulus * torch.cos(angle), modulus * torch.sin(angle)
        gamma = torch.sqrt(-torch.expm1(-2 * torch.exp(self.nu)))  # 1 - |λ|², without cancellation
        after = torch.cat(
            [a * u - b * v + gamma * linear(x, self.real), b * u + a * v + gamma * linear(x, self.imaginary)], 1
        )
        return after, after
