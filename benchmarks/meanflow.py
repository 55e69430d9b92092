"""A MeanFlow step of a diffusion transformer: time and peak memory under `gg.forward_mode()` and the math backend.

    python benchmarks/meanflow.py --sizes B/256,B/1024,XL/256 --seconds 100 --out FILE.json
    python benchmarks/meanflow.py --sizes tiny

The network and the loss are those of `examples/meanflow.py`, with the shapes of DiT on latents of 32 × 32 and 64 × 64,
in bfloat16 by autocast on a GPU; a step is loss, gradients and AdamW. Ways take turns: one step each, again and again
for so many seconds a size, after warm steps. Milliseconds are medians; the peak is above weights, gradients and the
optimiser's state. Ratios are to the math backend, eager or compiled alike. `gradients` is the distance from the math
backend's in float32, over their norm. The file is written anew after every size.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradguess as gg
from gradguess.backends.meter import peak_bytes, seconds

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "meanflow.py"))
SIZES = {  # positions, width, layers, heads, batch
    "tiny": (64, 64, 2, 4, 8),
    "S/256": (256, 384, 12, 6, 64),
    "B/256": (256, 768, 12, 12, 64),
    "B/1024": (1024, 768, 12, 12, 16),
    "XL/256": (256, 1152, 28, 16, 32),
}
FEATURES = 16  # of a patch of 2 × 2 with 4 channels
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "constant tangents": partial(gg.forward_mode, track_tangent_grad=False),
    "tracked tangents": gg.forward_mode,
    "math backend": lambda: sdpa_kernel(SDPBackend.MATH),
}


def build(size: str, device: torch.device) -> tuple[nn.Module, list[Tensor]]:
    """The network, as it is after some training, and a batch: images, noise, r, t."""
    positions, width, layers, heads, samples = SIZES[size]
    torch.manual_seed(0)
    model = EXAMPLE["DiT"](FEATURES, positions, width, layers, heads)
    for block in model.blocks:
        nn.init.normal_(block.modulation.weight, std=0.02)  # zeros would leave attention out
    batch = EXAMPLE["batch"](torch.randn(samples, positions, FEATURES), samples)
    return model.to(device), [t.to(device) for t in batch]


def loss_of(model: nn.Module, lower: bool, batch: list[Tensor]) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=lower):
        loss: Tensor = EXAMPLE["meanflow"](model, *batch)
    return loss


def way(context: str, compiled: bool, model: nn.Module, optimiser: torch.optim.Optimizer, batch: list[Tensor]) -> Any:
    """A step without arguments."""
    lower = batch[0].is_cuda

    def loss() -> Tensor:
        return loss_of(model, lower, batch)

    run = torch.compile(loss, fullgraph=True) if compiled else loss

    def step() -> None:
        optimiser.zero_grad(set_to_none=False)
        with CONTEXTS[context]():
            found = run()
        found.backward()
        optimiser.step()

    return step


def distance(context: str, model: nn.Module, batch: list[Tensor]) -> float:
    """Of the gradients of a few samples from those of the math backend in float32, which are exact beside bfloat16."""
    few, gradients = [t[:4] for t in batch], []
    for name, lower in ((context, batch[0].is_cuda), ("math backend", False)):
        with CONTEXTS[name]():
            loss = loss_of(model, lower, few)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def measure(size: str, device: torch.device, budget: float) -> dict[str, Any]:
    model, batch = build(size, device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)  # the weights stay about the same for all
    rows: dict[str, Any] = {}
    steps = {}
    for name in CONTEXTS:
        for compiled in (False, True) if device.type == "cuda" else (False,):
            label = f"{name}, compiled" if compiled else name
            try:
                steps[label] = way(name, compiled, model, optimiser, batch)
                for _ in range(3):
                    steps[label]()
                peak = peak_bytes(steps[label], device)
                rows[label] = {"peak MB": peak / 2**20 if peak is not None else None, "gradients": None, "ms": []}
                if not compiled:
                    rows[label]["gradients"] = distance(name, model, batch)
            except Exception as error:  # memory that runs out, a compiler that refuses: the row says so
                del steps[label]
                rows[label] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            if device.type == "cuda":
                torch.cuda.empty_cache()
    end = time.perf_counter() + budget
    while time.perf_counter() < end or any(len(rows[label]["ms"]) < 5 for label in steps):
        for label, step in steps.items():
            rows[label]["ms"].append(1e3 * seconds(step, device))
    for label in steps:
        rows[label]["ms"] = statistics.median(rows[label]["ms"])
    for label in steps:
        base = rows["math backend, compiled" if "compiled" in label else "math backend"]
        for what in ("ms", "peak MB") if "failed" not in base else ():
            rows[label][f"{what}, ratio"] = rows[label][what] / base[what]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="B/256,B/1024" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "sizes": SIZES, "rows": {}}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    for size in options.sizes.split(","):
        found["rows"][size] = measure(size, device, options.seconds)
        print(size)
        for label, row in found["rows"][size].items():
            print(f"  {label:28}", {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()})
        if options.out:
            options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
