"""Networks that are cut in pieces, their batches, small students, and the methods that use them. Float64, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from models import Block

BATCH, WIDTH, CLASSES = 6, 7, 4
cross_entropy = nn.CrossEntropyLoss(reduction="none")


def model_of(seed: int = 0, blocks: int = 6, middle: Callable[[], nn.Module] = lambda: Block(WIDTH)) -> nn.Sequential:
    torch.manual_seed(seed)
    stem, head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(stem, *(middle() for _ in range(blocks)), nn.LayerNorm(WIDTH), head).double()


def batch_of(seed: int = 1, size: int = BATCH) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 5, generator=source, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=source)


def small(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(*shape, 9), nn.Tanh(), nn.Linear(9, *outputs))


SITES = ["1", "3", "5"]  # cuts of `model_of`, and the pieces between them
PIECES = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, None)]

METHODS = {
    "loss": gg.Students(lr=1e-2),
    "loss chained": gg.Students(form="chained", lr=1e-2),
    "outputs": gg.Students(learn=("loss", "outputs"), lr=1e-2),
    "error": gg.Students(signal="error", lr=1e-2),
    "error chained": gg.Students(signal="error", form="chained", lr=1e-2),
    "tangents": gg.Students(signal="error", learn=("outputs", "tangents"), lr=1e-2),
    "loss, tangents": gg.Students(learn=("loss", "tangents"), lr=1e-2),
    "local": gg.LocalGuess(lr=1e-2),
}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * 1e-2, msg=name)


def trained(method: Any, steps: int = 3, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """Gradients of each step, and the object that made them."""
    model = model or model_of()
    forward = gg.ForwardGradient(model, method, **{"sites": 4, "seed": 2, **options})
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(steps):
        optimiser.zero_grad()
        torch.manual_seed(number)
        forward(cross_entropy, *batch_of(number))
        found.append(grads(model))
        optimiser.step()
    return found, forward


class Convolutions(nn.Module):
    """Convolution, batch norm, ReLU in place, and what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + x)


def images_model() -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), *(Convolutions(6) for _ in range(4)), *head).double()


def images() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, 8, 8, generator=source, dtype=torch.float64)
    return x, torch.randint(CLASSES, (5,), generator=source)
