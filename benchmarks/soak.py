"""Many steps at width 64 with every guess in turn: memory at the start and at the end, resumed against unbroken.

    python benchmarks/soak.py --steps 100000 --out DIR

At the end of each span of steps the state is saved, a second set of objects takes it up, and both go on for a while:
they must agree bit for bit. Memory is the resident set of the process, read after a warm-up and at the end.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradguess_lab.config import TrainConfig
from gradguess_lab.files import write_json
from gradguess_lab.methods import METHODS, settings_of
from gradguess_lab.train import build_forward

WIDTH, BATCH, CLASSES = 64, 32, 10
NAMES = (*(name for name in METHODS if name != "backprop"), "wperp-svd", "wperp-subspace")
SLOW = {"wperp-svd", "wperp-ns", "wp"}  # get a tenth of the steps
loss_fn = nn.CrossEntropyLoss(reduction="none")


class Trainer:
    """A network, its estimator and optimiser."""

    def __init__(self, method: str, memory: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )
        config = TrainConfig(**settings_of(method), memory=memory, width=WIDTH)  # type: ignore[arg-type]
        self.forward = build_forward(config, self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.Generator().manual_seed(0)

    def step(self) -> None:
        x = torch.randn(BATCH, WIDTH, generator=self.data)
        self.optimiser.zero_grad()
        self.forward(loss_fn, x, x[:, :CLASSES].argmax(1))
        self.optimiser.step()

    def save(self) -> dict[str, Any]:
        tensors = {k: v.clone(memory_format=torch.contiguous_format) for k, v in self.forward.state_dict().items()}
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "forward": tensors,
            "optimiser": self.optimiser.state_dict(),
            "data": self.data.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.forward.load_state_dict(state["forward"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.data.set_state(state["data"])

    def tensors(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.forward.state_dict().values()]


def resident() -> float:
    """MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def drift(trainer: Trainer, method: str, memory: str, steps: int) -> bool:
    """Does a second trainer that takes up the state leave the path of the first?"""
    second = Trainer(method, memory)
    second.load(copy.deepcopy(trainer.save()))
    for _ in range(steps):
        trainer.step()
        second.step()
    state, other = trainer.forward.state_dict(), second.forward.state_dict()
    same = state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    ours, theirs = trainer.model.state_dict(), second.model.state_dict()
    return not (same and all(torch.equal(ours[key], theirs[key]) for key in ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--span", type=int, default=200, help="steps with one method before the next has its turn")
    parser.add_argument("--out", type=Path, default=None, help="where the summary goes, as soak.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memories = itertools.cycle(["store", "replay"])
    done, drifts, rounds, marks = 0, [], 0, []
    started = time.perf_counter()
    while done < options.steps:
        memory = next(memories)
        for method in NAMES:
            span = max(10, options.span // (10 if method in SLOW else 1))
            trainer = Trainer(method, memory)
            for _ in range(span - 5):
                trainer.step()
            if drift(trainer, method, memory, 5):
                drifts.append(f"{method}-{memory}")
            done += span
        rounds += 1
        marks.append(resident())
        seconds = time.perf_counter() - started
        print(f"{done} steps, {marks[-1]:.1f} MiB, {len(drifts)} drifts, {seconds:.0f} s", flush=True)
    start = marks[min(1, len(marks) - 1)]  # both kinds of memory have had a round
    summary = {"steps": done, "rounds": rounds, "start_mib": start, "end_mib": marks[-1], "drifts": drifts}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "soak.json", summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
