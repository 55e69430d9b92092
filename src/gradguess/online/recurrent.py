"""`Recurrent`: cells and a readout as one model `forward(x, state) -> (output, state)`; `LRU`, a cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gradguess.errors import InputError
from gradguess.layers.recurrence import gru, lstm

FUSED = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)  # PyTorch's kernels for these cannot be vectorised on every device


class Recurrent(nn.Module):
    """A recurrent cell, or a stack of them, and a readout of the last cell's output.

    Cells of PyTorch (`nn.RNNCell`, `nn.GRUCell`, `nn.LSTMCell`) are computed by their formulas and not by fused
    kernels, which cannot be vectorised on every device. Any other module is called as `cell(x, state)`; it returns its
    new state, or (output, new state), and starts from `cell.initial_state(streams)`.

    The state is that of the cell, a tensor or (h, c); for a stack it is a tuple with one entry per cell.

    Args:
        cell: a cell, or a list of cells, the first one nearest to the input.
        readout: any module, applied to the output of the last cell; None returns that output.

    >>> import torch
    >>> from gradguess.online import Recurrent
    >>> model = Recurrent([torch.nn.GRUCell(3, 8), torch.nn.LSTMCell(8, 5)], torch.nn.Linear(5, 2))
    >>> output, state = model(torch.randn(4, 3), None)
    >>> output.shape, state[0].shape, len(state[1])
    (torch.Size([4, 2]), torch.Size([4, 8]), 2)
    """

    def __init__(self, cell: nn.Module | Sequence[nn.Module], readout: nn.Module | None = None) -> None:
        super().__init__()
        self.stacked = not isinstance(cell, nn.Module)
        cells = [cell] if isinstance(cell, nn.Module) else list(cell)
        for entry in cells:
            if type(entry) not in FUSED and not hasattr(entry, "initial_state"):
                raise InputError(
                    f"cell: expected nn.RNNCell, nn.GRUCell, nn.LSTMCell, gg.online.LRU or a module with "
                    f"initial_state(streams), found {type(entry).__name__}."
                )
        if not cells:
            raise InputError("cell: expected at least one cell, found none.")
        self.cells, self.readout = nn.ModuleList(cells), readout

    @property
    def elementwise(self) -> bool:
        """Whether no unit of the state sees another."""
        return len(self.cells) == 1 and bool(getattr(self.cells[0], "elementwise", False))

    def initial_state(self, streams: int) -> Any:
        """Zeros, or what a cell of another kind starts from."""
        states = tuple(_first(cell, streams) for cell in self.cells)
        return states if self.stacked else states[0]

    def forward(self, x: Tensor, state: Any = None) -> tuple[Any, Any]:
        """One step of all streams: the output of the readout, and the new state.

        Args:
            x: the input of each stream, (streams, inputs).
            state: what the step before returned; None starts anew.
        """
        if state is None:
            state = self.initial_state(x.shape[0])
        states = []
        for cell, before in zip(self.cells, state if self.stacked else (state,), strict=True):
            x, after = _step(cell, x, before)
            states.append(after)
        output = x if self.readout is None else self.readout(x)
        return output, tuple(states) if self.stacked else states[0]


def _step(cell: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Output and new state of one cell."""
    if type(cell) not in FUSED:
        result = cell(x, state)
        return result if isinstance(result, tuple) else (result, result)
    weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    if isinstance(cell, nn.LSTMCell):
        h, c = lstm(x, state, *weights)
        return h, (h, c)
    if isinstance(cell, nn.GRUCell):
        h = gru(x, state, *weights)
    else:
        s = linear(x, weights[0], weights[2]) + linear(state, weights[1], weights[3])
        h = torch.tanh(s) if cell.nonlinearity == "tanh" else torch.relu(s)
    return h, h


def _first(cell: Any, streams: int) -> Any:
    if type(cell) not in FUSED:
        return cell.initial_state(streams)
    zeros = cell.weight_hh.new_zeros(streams, cell.hidden_size).detach()
    return (zeros, zeros.clone()) if isinstance(cell, nn.LSTMCell) else zeros


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
