"""The cells against those of PyTorch and against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradguess import online as ol


@pytest.mark.parametrize(
    "cell",
    [
        nn.RNNCell(3, 4),
        nn.RNNCell(3, 4, nonlinearity="relu", bias=False),
        nn.GRUCell(3, 4),
        nn.GRUCell(3, 4, bias=False),
    ],
    ids=str,
)
def test_a_cell_is_that_of_pytorch(cell):
    x, h = torch.randn(5, 3), torch.randn(5, 4)
    output, state = ol.Recurrent(cell)(x, h)
    torch.testing.assert_close(output, cell(x, h))
    torch.testing.assert_close(state, output)


@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_is_that_of_pytorch(bias):
    cell = nn.LSTMCell(3, 4, bias=bias)
    x, before = torch.randn(5, 3), (torch.randn(5, 4), torch.randn(5, 4))
    output, state = ol.Recurrent(cell)(x, before)
    expected = cell(x, before)
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(output, expected[0])


def test_a_stack_passes_on_what_each_cell_gives():
    first, second, readout = nn.GRUCell(3, 4), nn.LSTMCell(4, 2), nn.Linear(2, 1)
    model = ol.Recurrent([first, second], readout)
    x = torch.randn(5, 3)
    output, (a, (h, c)) = model(x)
    torch.testing.assert_close(a, first(x))
    torch.testing.assert_close((h, c), second(a))
    torch.testing.assert_close(output, readout(h))
    assert not model.elementwise


def test_an_lru_is_a_recurrence_of_complex_numbers():
    cell = ol.LRU(3, 4)
    turn = torch.exp(-torch.exp(cell.nu) + 1j * torch.exp(cell.phi))
    B = torch.complex(cell.real, cell.imaginary)
    gamma = (1 - turn.abs() ** 2).sqrt()
    z, state = torch.zeros(2, 4, dtype=torch.complex64), cell.initial_state(2)
    for _ in range(4):
        x = torch.randn(2, 3)
        z = turn * z + gamma * (x.to(z.dtype) @ B.T)
        output, state = cell(x, state)
    torch.testing.assert_close(output, torch.cat([z.real, z.imag], 1))
    assert bool(((turn.abs() > 0.5) & (turn.abs() < 0.99)).all())
    assert ol.Recurrent(cell).elementwise
