"""Which runs a comparison is made of, and which learning rate each method gets.

For every task and method, short runs with a seed of their own choose one rate out of the same grid. Runs of full length
at that rate, with seeds 0, 1, …, are reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradguess.errors import InputError, check_count
from gradguess_lab.compare.contenders import CONTENDERS
from gradguess_lab.compare.tasks import SHORT, TASKS, Task
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import read_json
from gradguess_lab.methods import settings_of
from gradguess_lab.names import lookup
from gradguess_lab.run_many import is_finished, run_directory

SEEDS = 3
TUNING_SEED = 100
Entry = tuple[str, str]  # task, method


@dataclass(frozen=True)
class Comparison:
    """What was asked for. An empty grid is each task's own, as are an `epochs`, `width` and `samples` of 0."""

    tasks: Sequence[str] = ()
    methods: Sequence[str] = ()
    epochs: int = 0
    seeds: int = SEEDS
    grid: Sequence[float] = ()
    device: str = "cpu"
    width: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        for name in self.tasks:
            lookup(TASKS, name, "task")
        for name in self.methods:
            settings_of(name)
        check_count("seeds", self.seeds)
        for name in ("epochs", "width", "samples"):
            check_count(name, getattr(self, name), least=0)
        if not all(0 < rate < math.inf for rate in self.grid):
            raise InputError(f"grid: expected positive learning rates, found {list(self.grid)!r}.")

    @property
    def entries(self) -> list[Entry]:
        methods = self.methods or tuple(CONTENDERS)
        return [(task, method) for task in self.tasks or TASKS for method in dict.fromkeys(("backprop", *methods))]

    def task(self, name: str) -> TrainConfig:
        """A task as it is run here, before a method is chosen."""
        own = TASKS[name].config
        changed = {key: getattr(self, key) for key in ("epochs", "width", "samples") if getattr(self, key)}
        return dataclasses.replace(own, device=self.device, **changed)

    def rates(self, name: str) -> Sequence[float]:
        """The grid of a task."""
        return self.grid or TASKS[name].grid

    def short(self, name: str) -> int:
        """Epochs of a run that chooses a learning rate."""
        return max(1, self.task(name).epochs // SHORT)

    def config(self, entry: Entry) -> TrainConfig:
        task, method = entry
        return dataclasses.replace(self.task(task), **settings_in(TASKS[task], method))

    def tuning(self, entry: Entry) -> list[TrainConfig]:
        """The short runs; none where there is nothing to choose."""
        rates = self.rates(entry[0])
        if len(rates) == 1:
            return []
        base = dataclasses.replace(self.config(entry), epochs=self.short(entry[0]), seed=TUNING_SEED)
        return [dataclasses.replace(base, lr=rate) for rate in rates]

    def reported(self, entry: Entry, rate: float) -> list[TrainConfig]:
        return [dataclasses.replace(self.config(entry), lr=rate, seed=seed) for seed in range(self.seeds)]

    def scores(self, out: Path, entry: Entry) -> dict[float, float]:
        """What each rate of the grid reached on the test set; a rate that did not end is not among them."""
        return {
            config.lr: metrics_of(out, config)[quantity(entry[0])]
            for config in self.tuning(entry)
            if is_finished(out, config)
        }

    def best_rate(self, out: Path, entry: Entry) -> float | None:
        """The rate of the grid with the best short run; None if none of them ended."""
        rates = self.rates(entry[0])
        if len(rates) == 1:
            return rates[0]
        return best(self.scores(out, entry), less=is_text(entry[0]))


def settings_in(task: Task, method: str) -> dict[str, Any]:
    """The fields of `TrainConfig` that a method has on a task."""
    cut = method in CONTENDERS and CONTENDERS[method].pieces
    return {"sites": str(task.pieces) if cut else "auto", **settings_of(method)}


def best(scores: dict[float, float], less: bool) -> float | None:
    """The rate with the best score, the smaller one of two that are equal; scores that are no numbers do not count.

    >>> best({1e-3: 0.5, 3e-3: 0.6, 1e-2: float("nan")}, less=False)
    0.003
    """
    known = {rate: score for rate, score in scores.items() if math.isfinite(score)}
    return min(known, key=lambda rate: (known[rate] if less else -known[rate], rate), default=None)


def is_text(task: str) -> bool:
    return TASKS[task].config.data == "shakespeare"


def quantity(task: str, split: str = "test") -> str:
    """What a task is judged by."""
    return f"{split}_bits" if is_text(task) else f"{split}_accuracy"


def metrics_of(out: Path, config: TrainConfig) -> dict[str, float]:
    metrics: dict[str, float] = read_json(run_directory(out, config) / "result.json", "result")["metrics"]
    return metrics
