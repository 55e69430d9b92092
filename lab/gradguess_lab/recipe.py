"""What training adds to gradients: the optimiser, its learning rate over time, and images moved at random."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Shape

MOMENTUM = 0.9  # of SGD, which is Nesterov's
REACH = 4  # pixels by which an image moves at most, up, down, left and right

# what is left of the learning rate when a part of the way down is done
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


def learning_rate(config: TrainConfig, progress: float) -> float:
    """The rate when the part `progress` of all steps is done: it rises over `warmup`, then follows the schedule.

    >>> config = TrainConfig(schedule="linear", warmup=0.2, lr=1.0)
    >>> [round(learning_rate(config, progress), 2) for progress in (0, 0.1, 0.2, 0.6, 1)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    return config.lr * SCHEDULES[config.schedule]((progress - config.warmup) / (1 - config.warmup))


def set_rate(optimiser: torch.optim.Optimizer, config: TrainConfig, progress: float) -> None:
    """Give the optimiser the rate of this moment. In a tensor, captured steps see it too."""
    if config.schedule == "constant" and not config.warmup:
        return
    rate = learning_rate(config, progress)
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def as_weights(optimiser: torch.optim.Optimizer) -> None:
    """Lay out the optimiser's state as its weights lie in memory: fused kernels need that, and files do not keep it."""
    for weight, slots in optimiser.state.items():
        for name, value in slots.items():
            if value.shape == weight.shape:
                slots[name] = torch.empty_like(weight, dtype=value.dtype, requires_grad=False).copy_(value)


def build_optimiser(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of `config`; on a GPU one whose steps can be captured."""
    cuda = config.device.startswith("cuda")
    lr = torch.tensor(config.lr, device=config.device) if cuda else config.lr
    if config.optimiser == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr, MOMENTUM, nesterov=True, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=config.weight_decay, fused=True, capturable=cuda)


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
