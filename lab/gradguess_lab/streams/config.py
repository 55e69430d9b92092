"""One run on a stream: a frozen record, the same for every rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gradguess as gg
from gradguess.errors import InputError
from gradguess_lab.names import unknown
from gradguess_lab.streams.tasks import NAMES

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
BASES = ("wperp", "observable", "lagged", "krylov", "random")  # `gradguess.online.bases`
CELLS = ("rnn", "gru", "lstm", "lru")
STARTS = ("orthogonal", "critical", "uniform")
CHOICES: dict[str, Iterable[str]] = {
    "task": NAMES,
    "rule": RULES,
    "basis": BASES,
    "cell": CELLS,
    "start": STARTS,
}


def option(default: Any, text: str) -> Any:
    """A field with the text that the command line shows for it; `{name}` stands for the choices of that field."""
    listed = {name: ", ".join(known) for name, known in CHOICES.items()}
    return dataclasses.field(default=default, metadata={"help": text.format(**listed)})


@dataclass(frozen=True)
class StreamConfig:
    """One run on a stream; equal records give equal results.

    >>> StreamConfig(rule="rtrl", seed=2).key
    'recall-rtrl-seed2'
    >>> StreamConfig(k=24, lr=3e-3).key
    'recall-wperp-k24-lr0.003-seed0'
    """

    task: str = option("recall", "stream: {task}")
    delay: int = option(12, "steps between a question and its answer (recall, copy), or length of the corridor (tmaze)")
    rule: str = option("wperp", "how the past gets credit: {rule}")
    k: int = option(16, "directions that are kept (wperp, wperp-...)")
    basis: str = option("lagged", "which directions are kept (wperp, wperp-...): {basis}")
    refresh: int = option(
        50, "steps between two searches for the directions (wperp, wperp-...), which a block has (wperp-blocks)"
    )
    truncation: int = option(16, "steps that an error goes back (tbptt)")
    cell: str = option("rnn", "recurrent cell: {cell}")
    width: int = option(64, "units of the cell")
    start: str = option("orthogonal", "recurrent weights of an rnn at the start: {start}")
    streams: int = option(16, "streams that are learned from at the same time")
    steps: int = option(5000, "steps of the stream")
    lr: float = option(1e-3, "learning rate of Adam")
    stop: int = option(0, "weights stay as they are after so many steps; 0: learning goes on")
    seed: int = option(0, "seed of the model, the stream and the rule")
    device: str = option("cpu", "device of PyTorch")

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for name in ("delay", "k", "refresh", "truncation", "width", "streams", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if self.seed < 0 or self.stop < 0:
            raise InputError(f"seed and stop must not be negative, found {self.seed} and {self.stop}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"lr must be a positive number, found {self.lr}.")

    @property
    def key(self) -> str:
        """A name for the run: task and rule, what differs from the defaults in their order, seed and device."""
        parts = [self.task, self.rule]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in ("task", "rule", "seed", "device") and value != item.default:
                parts.append(f"{item.name}{value}")
        return "-".join([*parts, f"seed{self.seed}", *([self.device] if self.device != "cpu" else [])])

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
