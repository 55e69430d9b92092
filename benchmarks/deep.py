"""Time and memory of a training step of the deep networks for CIFAR-10, by method and number of pieces.

    python benchmarks/deep.py --device cuda --out results/deep
    python benchmarks/deep.py --only resnet18-cifar10 --small

Each way has a process of its own, one after another, and images that are noise. Captured steps on CUDA, the recipes'
precision and batches. The time is the mean of `--steps` steps; the peak is what a step needs above what lives between
steps: weights, the optimiser's state, students. Rows are written as they end, and what is written is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import gradguess as gg
from gradguess.backends import seconds
from gradguess.captured_step import WARM_UP
from gradguess_lab import environment
from gradguess_lab.bench.record import keep
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Dataset
from gradguess_lab.loss import smoothed_loss
from gradguess_lab.optimiser import build_optimiser
from gradguess_lab.recipes import RECIPES
from gradguess_lab.store import find
from gradguess_lab.train import autocast, build_forward, build_model

PIECES = {"resnet18-cifar10": ("4", "8"), "vit-cifar10": ("4",)}
IN_PIECES = ("students", "students-chained", "students-error", "local-linear", "checkpointed")
WARM = 3  # steps after those that cannot be recorded; the first of them is


def ways(task: str) -> list[dict[str, Any]]:
    """What is measured with a network: method, pieces, compiled or not."""
    whole = [{"method": "backprop", "sites": "auto", "compiled": compiled} for compiled in (False, True)]
    cut = [{"method": name, "sites": n, "compiled": False} for n in PIECES[task] for name in IN_PIECES]
    compiled = [{"method": "students", "sites": n, "compiled": True} for n in PIECES[task]]
    return [{"task": task, **way} for way in (*whole, *cut, *compiled)]


def measure(way: dict[str, Any], device: str, steps: int, small: bool) -> dict[str, Any]:
    """One row, in this process."""
    config = dataclasses.replace(
        RECIPES[way["task"]], method=way["method"], sites=way["sites"], compile=way["compiled"], device=device
    )
    if small:
        config = dataclasses.replace(config, width=config.width // 8, batch=4, autocast=False)
    torch.set_float32_matmul_precision(config.matmul)
    torch.backends.cudnn.benchmark = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(config.batch, 3, 32, 32, generator=generator).to(device)
    t = torch.randint(10, (config.batch,), generator=generator).to(device)
    step = _step(config, Dataset(x, t, x, t, 10, "image"))

    def advance() -> torch.Tensor:
        with autocast(config):  # around one step alone: it keeps the weights that it has cast until it ends
            loss: torch.Tensor = step(x, t)
        return loss

    losses = [float(advance()) for _ in range(WARM_UP)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # what tracing needs once is not what a step needs
    losses += [float(advance()) for _ in range(WARM)]
    spent = seconds(lambda: [advance() for _ in range(steps)], torch.device(device))
    row = {**way, "step_ms": 1e3 * spent / steps, "losses": losses}
    if device == "cuda":
        row["captured"] = bool(getattr(step, "captured", ()))
        row["peak_mb"] = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**20
    return row


def _step(config: TrainConfig, data: Dataset) -> Any:
    """A function that trains the network on a batch, as `gradguess train` does."""
    model = build_model(config, data)
    forward, optimiser = build_forward(config, model), build_optimiser(config, model)
    loss_fn = smoothed_loss(config.smoothing)
    if config.device == "cuda":
        return gg.CapturedStep(forward, optimiser, loss_fn)

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        loss = forward(loss_fn, x, t)
        optimiser.step()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a directory; without it rows are printed alone")
    parser.add_argument("--only", choices=tuple(PIECES), help="one network")
    parser.add_argument("--methods", nargs="*", choices=("backprop", *IN_PIECES), help="some, none of them compiled")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--small", action="store_true", help="narrow networks and batches of four, to try the script")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a way, as JSON: measured in this process
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one), options.device, options.steps, options.small)))
        return
    earlier = find(options.out, "steps") if options.out else None
    rows: list[dict[str, Any]] = list(earlier["rows"]) if earlier else []
    for way in [way for task in ((options.only,) if options.only else PIECES) for way in ways(task)]:
        left_out = options.methods and (way["compiled"] or way["method"] not in options.methods)
        if left_out or any(way.items() <= row.items() for row in rows):
            continue
        words = [sys.executable, __file__, "--device", options.device, "--steps", str(options.steps)]
        words += [*(("--small",) if options.small else ()), "--one", json.dumps(way)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{way}: failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        record = {"schema": 1, "kind": "steps", "environment": environment.describe(options.device), "rows": rows}
        keep(record, options.out, "steps.json")


if __name__ == "__main__":
    main()
