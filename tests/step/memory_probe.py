"""Run by test_memory.py in a process of its own: how much the resident memory rises over one step, in MiB.

    python memory_probe.py WIDTH BATCH METHOD:DEPTH...      METHOD: forward, backward, or GUESS-MEMORY (shared-replay),
                                                            with -gelu for a network of GELUs instead of ReLUs;
                                                            students: pieces of four layers

Prints a JSON object. Gradients exist beforehand, as in training after the first step. Needs Linux, and glibc's
MALLOC_MMAP_THRESHOLD_ set to a small number: then large blocks go back to the system at once and the rise is exact.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import gradguess as gg

GUESSES = {
    "weight": gg.WeightPerturbation(),
    "activation": gg.ActivationPerturbation(),
    "wt": gg.WTranspose(),
    "shared": gg.WPerp(refresh=1000),
}
PIECE = 4  # layers


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rise(method: str, depth: int, width: int, batch: int) -> float:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.GELU() if method.endswith("-gelu") else nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10, bias=False))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    if "-" in method:
        guess, memory = method.split("-")[:2]
        forward = gg.ForwardGradient(model, GUESSES[guess], memory=memory)
    elif method == "students":
        forward = gg.ForwardGradient(model, gg.Students(), sites=depth // PIECE)

    def step(x: torch.Tensor, t: torch.Tensor) -> None:
        if method == "forward":
            with torch.no_grad():
                loss_fn(model(x), t).mean()
        elif method == "backward":
            loss_fn(model(x), t).mean().backward()
        else:
            forward(loss_fn, x, t)

    step(torch.randn(8, width), torch.randint(10, (8,)))  # layout, bases, gradients and kernels are there
    x, t = torch.randn(batch, width), torch.randint(10, (batch,))
    reset_peak()
    before = peak()
    step(x, t)
    return peak() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    width, batch = map(int, sys.argv[1:3])
    specs = [spec.split(":") for spec in sys.argv[3:]]
    print(json.dumps({f"{method}:{depth}": rise(method, int(depth), width, batch) for method, depth in specs}))
