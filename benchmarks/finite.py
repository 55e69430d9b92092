"""How far differences of plain passes are from the derivative, and what that does to training.

    python benchmarks/finite.py results/finite/accuracy.json

The first table: the directional derivative `c` of 256 samples along one set of directions, with `derivative="finite"`
and `"dual"` in float32 and in bfloat16, against dual numbers in float64 with the same (rounded) weights and directions.
Errors are relative to the root mean square of `c` over the samples, since a sample's own `c` may be zero. Networks are
fresh, or trained by backpropagation for ten epochs. The second table: accuracies of whole runs, with both derivatives.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, find_layout, refreshed
from gradguess.model.site import Site
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import Carried, choose_pass
from gradguess.step.base import Options, State, Step
from gradguess.step.measure import Drawing
from gradguess_lab import environment
from gradguess_lab.bench.run import keep
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Dataset, load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.train import build_model, train

SAMPLES, EPOCHS = 256, 10
NETWORKS = {
    "mlp, ReLU": TrainConfig(width=256, depth=3),
    "mlp, GELU": TrainConfig(width=256, depth=3, activation="gelu"),
    "mlp, 12 layers": TrainConfig(width=128, depth=12),
    "cnn": TrainConfig(model="cnn", width=16, depth=3),
    "residual mlp": TrainConfig(model="residual", width=128, depth=6),
    "transformer": TrainConfig(model="vit", width=64, depth=4),
    "adapters": TrainConfig(model="vit", width=64, depth=4),
}
GUESSES: dict[str, gg.Guess] = {"wperp": gg.WPerp(), "activation": gg.ActivationPerturbation()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RUNS = [
    TrainConfig(method=method, width=256, epochs=100, lr=1e-3, seed=seed, derivative=derivative, dtype=dtype)  # type: ignore[arg-type]
    for method in ("wperp", "feedback-chained")
    for dtype in DTYPES
    for derivative in ("dual", "finite")
    for seed in range(3)
]


class Adapter(nn.Module):
    """A frozen linear layer, and beside it two small ones of which the upper starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(frozen.in_features, rank, bias=False), nn.Linear(rank, frozen.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """Adapters on all linear layers of a network that is frozen otherwise."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Adapter(child))
    return model


def networks(data: Dataset) -> Any:
    """(name, epochs of backpropagation, network)."""
    for name, config in NETWORKS.items():
        model = build_model(config, data)
        if name == "adapters":
            fit(model, data, EPOCHS)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = adapted(model)
        yield name, 0, copy.deepcopy(model)
        fit(model, data, EPOCHS)
        yield name, EPOCHS, model


def fit(model: nn.Module, data: Dataset, epochs: int) -> None:
    """Plain backpropagation."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    source = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.x_train), generator=source).split(128):
            optimiser.zero_grad()
            per_sample_loss(model(data.x_train[batch]), data.y_train[batch]).mean().backward()
            optimiser.step()


def errors(model: nn.Module, guess: gg.Guess, x: Tensor, t: Tensor) -> dict[str, list[float]]:
    """Median, 90 % quantile and largest error of `c`, by derivative."""
    task, options = Task(model, per_sample_loss, x, t), Options()
    plan = Plan(as_method(guess), "auto", options)
    layout = find_layout(plan, task)
    state = refreshed(plan, task, [task], layout, x.device, State())
    step = Step(task, layout, choose_pass(task, layout), Noise(torch.Generator().manual_seed(0)), options, state)
    drawing, ys = Drawing(step, guess), dict[str, Tensor]()

    def draw(site: Site, x: Any, s: Tensor) -> Tensor:
        if site.name not in ys:
            ys[site.name] = drawing.directions(site, s, site.gate_at(s))[0]
        return ys[site.name].to(s.dtype)

    found = {name: choose_pass(task, layout, finite=name == "finite").tangent(draw) for name in ("finite", "dual")}
    exact = Task(copy.deepcopy(model).double(), per_sample_loss, x.double(), t)
    reference = choose_pass(exact, find_layout(plan, exact), keep=False).tangent(draw).jvp
    return {name: summary(carried, reference) for name, carried in found.items()}


def summary(carried: Carried, reference: Tensor) -> list[float]:
    error = (carried.jvp.double() - reference).abs() / reference.square().mean().sqrt()
    return [float(error.median()), float(error.quantile(0.9)), float(error.max())]


def main(out: str) -> None:
    environment.source()  # before the code may change
    data = load("mnist1d").to("cpu", torch.float32)
    derivatives, runs = [], []
    for name, epochs, model in networks(data):
        for dtype, kind in DTYPES.items():
            x, t = data.x_train[:SAMPLES].to(kind), data.y_train[:SAMPLES]
            for guess, drawn in GUESSES.items():
                found = errors(copy.deepcopy(model).to(kind), drawn, x, t)
                derivatives.append({"network": name, "epochs": epochs, "dtype": dtype, "guess": guess, **found})
                print(derivatives[-1], flush=True)
    for config in RUNS:
        metrics = train(config)["metrics"]
        about = {key: getattr(config, key) for key in ("method", "dtype", "derivative", "seed")}
        runs.append(about | {key: metrics[key] for key in ("train_accuracy", "test_accuracy", "step_ms")})
        print(runs[-1], flush=True)
    about = {"samples": SAMPLES, "epochs": EPOCHS, "run": RUNS[0].as_dict(), "environment": environment.describe("cpu")}
    keep({"schema": 1, **about, "derivatives": derivatives, "runs": runs}, Path(out).parent, Path(out).stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
