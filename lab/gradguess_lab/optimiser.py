"""How gradients become steps: the optimiser of a run, and its learning rate over time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradguess_lab.config import TrainConfig

MOMENTUM = 0.9  # of SGD, which is Nesterov's

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
