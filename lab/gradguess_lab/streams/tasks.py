"""The tasks by name. Each takes the number of streams, the delay and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gradguess_lab.names import later

if TYPE_CHECKING:
    import torch

    from gradguess_lab.streams.task import Task

_HERE = "gradguess_lab.streams"
TASKS: Mapping[str, Callable[[int, int, torch.Generator], Task]] = {
    "recall": later(f"{_HERE}.memory", "recall"),
    "copy": later(f"{_HERE}.memory", "copy"),
    "henon": later(f"{_HERE}.chaos", "henon"),
    "lorenz": later(f"{_HERE}.chaos", "lorenz"),
    "balancing": later(f"{_HERE}.balancing", "balancing"),
    "characters": later(f"{_HERE}.characters", "characters"),
    "sensor": later(f"{_HERE}.sensor", "sensor"),
}
NAMES = (*TASKS, "tmaze")  # an agent acts in the T-maze: it is no stream that one can only watch
