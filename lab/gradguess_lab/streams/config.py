"""One run on a stream: a frozen record, the same for every rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradguess as gg
from gradguess.errors import InputError
from gradguess_lab.config import Settings, option

# `gradguess_lab.streams.tasks`, and an agent in the T-maze, which is no stream that one can only watch
TASKS = ("recall", "copy", "henon", "lorenz", "balancing", "characters", "sensor", "tmaze")
RULES: Mapping[str, Callable[[Any], gg.online.Rule]] = {
    "rtrl": lambda c: gg.online.RTRL(),
    "wperp": lambda c: gg.online.WPerp(c.k, c.basis, c.refresh),
    "wperp-snap": lambda c: gg.online.Completed(gg.online.WPerp(c.k, c.basis, c.refresh)),
    "wperp-blocks": lambda c: gg.online.Blockwise(gg.online.WPerp(c.k, c.basis, c.refresh)),
    "snap": lambda c: gg.online.SnAp(1),
    "uoro": lambda c: gg.online.UORO(),
    "rflo": lambda c: gg.online.RFLO(),
    "eprop": lambda c: gg.online.EProp(),
    "tbptt": lambda c: gg.online.TBPTT(c.truncation),
    "one-step": lambda c: gg.online.OneStep(),
}
_BASIS = ("k", "basis")
# the settings that a rule reads and others ignore
READ = {"wperp": _BASIS, "wperp-snap": _BASIS, "wperp-blocks": (*_BASIS, "refresh"), "tbptt": ("truncation",)}
BASES = ("wperp", "observable", "lagged", "krylov", "random")  # `gradguess.online.basis_rules`
CELLS = ("rnn", "gru", "lstm", "lru")
STARTS = ("orthogonal", "critical", "uniform")


@dataclass(frozen=True)
class StreamConfig(Settings):
    """One run on a stream; equal records give equal results.

    >>> StreamConfig(rule="rtrl", seed=2).key
    'recall-rtrl-seed2'
    >>> StreamConfig(k=24, lr=3e-3).key
    'recall-wperp-k24-lr0.003-seed0'
    """

    task: str = option("recall", "stream: {}", TASKS)
    delay: int = option(
        12, "steps between a question and its answer (recall, copy), or length of the corridor (tmaze)", least=1
    )
    rule: str = option("wperp", "how the past gets credit: {}", RULES)
    k: int = option(16, "directions that are kept (wperp, wperp-...)", least=1)
    basis: str = option("lagged", "which directions are kept (wperp, wperp-...): {}", BASES)
    refresh: int = option(
        50,
        "steps between two searches for the directions (wperp, wperp-...), which a block has (wperp-blocks)",
        least=1,
    )
    truncation: int = option(16, "steps that an error goes back (tbptt)", least=1)
    cell: str = option("rnn", "recurrent cell: {}", CELLS)
    width: int = option(64, "units of the cell", least=1)
    start: str = option("orthogonal", "recurrent weights of an rnn at the start: {}", STARTS)
    streams: int = option(16, "streams that are learned from at the same time", least=1)
    steps: int = option(5000, "steps of the stream", least=1)
    lr: float = option(1e-3, "learning rate of Adam")
    stop: int = option(0, "weights stay as they are after so many steps; 0: learning goes on", least=0)
    seed: int = option(0, "seed of the model, the stream and the rule", least=0)
    device: str = option("cpu", "device of PyTorch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr must be positive and finite, found {self.lr!r}.")

    @property
    def key(self) -> str:
        """A name for the run: task and rule, what differs from the defaults in their order, seed and device."""
        parts = [self.task, self.rule]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in ("task", "rule", "seed", "device") and value != item.default:
                parts.append(f"{item.name}{value}")
        return "-".join([*parts, f"seed{self.seed}", *([self.device] if self.device != "cpu" else [])])
