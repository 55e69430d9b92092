"""How far differences of plain passes are from the derivative, and what that does to training.

    python benchmarks/finite.py results/finite/accuracy.json

The first table: the directional derivative `c` of 256 samples along one set of directions, with `derivative="finite"`
and `"dual"` in float32 and in bfloat16, against the gradient in float64 with the same (rounded) weights and directions.
Errors are relative to the root mean square of `c` over the samples, since a sample's own `c` may be zero. Networks are
fresh, or trained by backpropagation for ten epochs. The second table: accuracies of the runs of the experiment
`finite`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

import gradguess as gg
from gradguess_lab import environment, plans
from gradguess_lab.bench.run import keep
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Dataset, load
from gradguess_lab.jobs import at_once, run_plans
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.train import build_model

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
METRICS = ("train_accuracy", "test_accuracy", "step_ms")


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
    exact = gg.estimate(copy.deepcopy(model).double(), gg.Backprop(), per_sample_loss, x.double(), t).site_grads
    found = {}
    for name in ("finite", "dual"):
        generator = torch.Generator().manual_seed(0)
        est = gg.estimate(model, guess, per_sample_loss, x, t, derivative=name, generator=generator)
        parts = [(y[0].double() * exact[site]).flatten(1).sum(1) for site, y in est.directions.items()]
        reference = torch.stack(parts).sum(0)
        error = (est.jvp[0].double() - reference).abs() / reference.square().mean().sqrt()
        found[name] = [float(error.median()), float(error.quantile(0.9)), float(error.max())]
    return found


def main(out: Path) -> None:
    environment.source()  # before the code may change
    data = load("mnist1d").to("cpu", torch.float32)
    derivatives = []
    for name, epochs, model in networks(data):
        for dtype, kind in DTYPES.items():
            x, t = data.x_train[:SAMPLES].to(kind), data.y_train[:SAMPLES]
            for guess, drawn in GUESSES.items():
                found = errors(copy.deepcopy(model).to(kind), drawn, x, t)
                derivatives.append({"network": name, "epochs": epochs, "dtype": dtype, "guess": guess, **found})
                print(derivatives[-1], flush=True)
    jobs = plans.jobs("paper", ["finite"], seeds=3)
    rows, _ = run_plans([at_once(jobs)], out.parent)
    keys = ("method", "dtype", "derivative", "seed")
    runs = [{key: row["config"][key] for key in keys} | {key: row["metrics"][key] for key in METRICS} for row in rows]
    about = {"samples": SAMPLES, "epochs": EPOCHS, "run": jobs[0].settings.as_dict()}
    where = {"environment": environment.describe("cpu")}
    keep({"schema": 1, **about, **where, "derivatives": derivatives, "runs": runs}, out.parent, out.stem)


if __name__ == "__main__":
    typer.run(main)
