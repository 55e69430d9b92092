"""What the networks share: seeded initialisation, and reading samples of one or two dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from gradguess.errors import InputError

if TYPE_CHECKING:
    from gradguess_lab.data import Shape

Network = TypeVar("Network", bound=nn.Module)


def drawn(make: Callable[[], Network], generator: torch.Generator) -> Network:
    """A network with PyTorch's own initialisation, drawn from `generator`; the global generator is left alone."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


class AsImage(nn.Module):
    """Give a signal (batch, length) its one channel; images pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x


def channels(shape: Shape) -> int:
    return shape.size[0] if shape.kind == "image" else 1


def extent(shape: Shape) -> int:
    """Pixels along one side, or the length of a signal."""
    return shape.size[-1]


def convolution(shape: Shape) -> type[nn.Conv1d] | type[nn.Conv2d]:
    return nn.Conv2d if shape.kind == "image" else nn.Conv1d


def refuse_text(shape: Shape, name: str) -> None:
    if shape.kind == "text":
        raise InputError(f"The model {name!r} reads numbers, not text: use charformer or gru with this data.")


class Patches(nn.Module):
    """Cut a sample into patches and embed each: (batch, tokens, width), with a learned position."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        side = patch_size(extent(shape))
        self.as_image = AsImage()
        self.embed = convolution(shape)(channels(shape), width, side, stride=side)
        self.tokens = (extent(shape) // side) ** (2 if shape.kind == "image" else 1)
        self.position = nn.Parameter(0.02 * torch.randn(self.tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.as_image(x)).flatten(2).mT + self.position


def patch_size(side: int) -> int:
    """The largest of 4, 2 and 1 that divides the side and leaves at least four patches along it."""
    return next(size for size in (4, 2, 1) if (side % size == 0 and side // size >= 4) or size == 1)
