"""The tasks by name. Each takes the number of streams, the delay and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gradguess.experiments.streams.balancing import balancing
from gradguess.experiments.streams.chaos import henon, lorenz
from gradguess.experiments.streams.characters import characters
from gradguess.experiments.streams.memory import copy, recall
from gradguess.experiments.streams.sensor import sensor
from gradguess.experiments.streams.task import Task

TASKS: Mapping[str, Callable[[int, int, torch.Generator], Task]] = {
    "recall": recall,
    "copy": copy,
    "henon": henon,
    "lorenz": lorenz,
    "balancing": balancing,
    "characters": characters,
    "sensor": sensor,
}
NAMES = (*TASKS, "tmaze")  # an agent acts in the T-maze: it is no stream that one can only watch
