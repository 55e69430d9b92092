"""A residual network that is cut in pieces, its batches, and small students. Float64, seeded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
