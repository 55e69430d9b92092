"""What a step with students holds at a time, in activations of the cut, as the meter of the CPU counts it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.meter import peak_bytes
from pieces import CLASSES, cross_entropy

WIDTH, BATCH, BLOCKS = 32, 2048, 3
ACTIVATION = 4 * WIDTH * BATCH


class Residual(nn.Module):
    """For its gradient a block needs what its two activation functions return. `branch` and the sum are local."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.outer(self.act1(self.inner(x)))
        return self.act2(x + branch)


def network(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(stem, *(Residual() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES))


def narrow(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    """A student that needs no memory to speak of."""
    return nn.Linear(*shape, *outputs)


@pytest.mark.parametrize("pieces", [2, 4])
def test_beside_a_piece_there_are_three_gradients_and_nothing_else(pieces):
    """Gradients: that of the skip connection, which waits, and those of the output and the input of a layer."""
    forward = gg.ForwardGradient(network(pieces * BLOCKS), gg.Students(narrow), sites=pieces)
    x, t = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    for _ in range(2):
        forward(cross_entropy, x, t)
    peak = peak_bytes(lambda: forward(cross_entropy, x, t), torch.device("cpu")) / ACTIVATION
    piece = 1 + 2 * BLOCKS  # the stem's output, or that of the piece below; two of each block
    assert piece + 2 < peak < piece + 3.5


class Damped(nn.Linear):
    """Its gradient is a tenth of what arrives."""

    factor = 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(super().forward(x))
        if y.requires_grad:
            y.register_hook(lambda g: self.factor * g)
        return y


@pytest.mark.parametrize("form", ["direct", "chained"])
def test_hooks_of_the_model_see_the_gradient(form, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(Damped(4, 6), Damped(6, 6), nn.Linear(6, CLASSES))
    x, t, found = torch.randn(8, 4), torch.zeros(8).long(), []
    for factor in (0.1, 1.0):
        monkeypatch.setattr(Damped, "factor", factor)
        model.zero_grad()
        gg.ForwardGradient(model, gg.Students(form=form), sites=["0", "1", "2"])(cross_entropy, x, t)
        assert model[1].weight.grad is not None
        found.append(model[1].weight.grad.clone())
    torch.testing.assert_close(found[0], 0.1 * found[1])
    assert found[0].any()
