"""Training images moved and mirrored at random: one draw for each image and epoch, one gather for each batch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess_lab.data import Shape

REACH = 4  # pixels by which an image moves at most, up, down, left and right


def check_augment(shape: Shape) -> None:
    """Refuse data that has nothing to move."""
    if shape.kind != "image" or min(shape.size[1:]) <= REACH:
        raise InputError(
            f"augment moves images of more than {REACH} pixels along a side, found a sample of kind {shape.kind!r} "
            f"and size {shape.size}: leave out --augment, or use --data cifar10."
        )


def draw_moves(count: int, generator: torch.Generator) -> Tensor:
    """For each image how far it moves down and right, and whether it is mirrored: (count, 3), from a CPU's generator.

    Every device and every process sees the same numbers.
    """
    shifts = torch.randint(-REACH, REACH + 1, (count, 2), generator=generator)
    return torch.cat([shifts, torch.randint(2, (count, 1), generator=generator)], 1)


def moved(x: Tensor, chosen: Tensor, moves: Tensor) -> Tensor:
    """The images `x[chosen]`, each moved by its own row of `moves`; the edge reflects what would come from outside.

    This is the crop of a padded image, without the padded copy: the place of every pixel is computed, and gathered.
    """
    down, right, mirrored = moves.unbind(1)
    rows = _within(torch.arange(x.shape[2], device=x.device) - down[:, None], x.shape[2])  # (batch, height)
    columns = _within(torch.arange(x.shape[3], device=x.device) - right[:, None], x.shape[3])  # (batch, width)
    columns = torch.where(mirrored[:, None] > 0, columns.flip(1), columns)
    planes = torch.arange(x.shape[1], device=x.device)[:, None, None]
    return x[chosen[:, None, None, None], planes, rows[:, None, :, None], columns[:, None, None, :]]


def _within(place: Tensor, size: int) -> Tensor:
    """Reflect places that lie outside: -1 is 1, and `size` is `size - 2`."""
    return size - 1 - (size - 1 - place.abs()).abs()
