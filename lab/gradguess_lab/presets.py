"""How much of each experiment is run."""

from __future__ import annotations

from dataclasses import dataclass

from gradguess_lab.config import Solver, TrainConfig
from gradguess_lab.real import RATES

Runs = list[TrainConfig]
DIAGNOSE = "0,1,3,10,30,100,200,300"  # epochs; the same in every preset, so that presets share their runs


@dataclass(frozen=True)
class Preset:
    """One size of the whole."""

    widths: tuple[int, ...]
    seeds: int  # unless another number is asked for
    heavy: bool  # whether runs that take an hour on a CPU belong to it
    wide: tuple[int, ...] = ()  # further widths for the study of learned feedback
    samples: int = 0  # of real data to train on; 0: all
    rates: tuple[float, ...] = RATES  # learning rates of networks on real data
    solvers: tuple[Solver, ...] = ("shared",)  # of W⊥; the paper's is each sample's own subspace

    def near(self, *wanted: int) -> tuple[int, ...]:
        """The wanted widths that this preset has, or its largest if it has none of them."""
        return tuple(width for width in wanted if width in self.widths) or (max(self.widths),)


PRESETS = {
    "quick": Preset(widths=(64, 128), seeds=1, heavy=False, samples=2000, rates=(1e-3,)),
    "paper": Preset(
        widths=(64, 128, 256, 512), seeds=10, heavy=True, wide=(1024, 2048), solvers=("subspace", "shared")
    ),
}
