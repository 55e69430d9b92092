"""How far each way to find W⊥ is from its definition, the SVD of every sample, on first and on trained weights.

    python scripts/projector_error.py OUT.json RUN_DIRECTORY...

For every run (a directory of `gradguess train`) and every layer that is guessed: the spectral norm of the difference
between the covariance of the guess and the projector on the sample's own top-k subspace. 0 is equal, 1 is a direction
of which nothing is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradguess as gg
from gradguess.methods.run import Plan, find_layout, refreshed
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import choose_pass
from gradguess.step.base import Options, State, Step
from gradguess.step.measure import Drawing
from gradguess_lab import checkpoint, environment
from gradguess_lab.bench.run import keep
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.train import build_model

SAMPLES = 64  # that are decomposed, of a batch of 512
GUESSES = {
    "subspace": gg.WPerp(solver="subspace"),
    "shared": gg.WPerp(),
    "ns, nearest": gg.WPerpNS(threshold="nearest"),
    "ns, placed": gg.WPerpNS(threshold="placed"),
}


def covariances(model: torch.nn.Module, guess: gg.Guess, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """`Cov(y)` of the first samples at every site with something above it, (samples, d, d)."""
    task = Task(model, per_sample_loss, x, y)
    plan = Plan(gg.methods.Guessed(guess), "auto", Options(), detail=True)
    layout = find_layout(plan, task)
    noise = Noise(torch.Generator(x.device).manual_seed(0))
    state = refreshed(plan, task, [task], layout, x.device, State())
    step = Step(task, layout, choose_pass(task, layout), noise, plan.options, state)
    outputs: dict[str, Tensor] = {}
    step.passes.plain(lambda site, x, s: outputs.update({site.name: s.clone()}))
    drawing, found = Drawing(step, guess), {}
    for site in layout.guessed:
        s = outputs[site.name]
        frame = drawing.frame(site, s, site.gate_at(s))
        eye = torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
        rows = []
        for part in eye.split(16):  # columns of the covariance, for all samples
            v = part[:, None].expand(-1, len(s), -1)
            rows.append(frame.apply(frame.adjoint(v))[:, :SAMPLES])
        found[site.name] = torch.cat(rows).permute(1, 2, 0)
    return found


def definition(model: torch.nn.Module, guess: gg.WPerp, x: Tensor) -> dict[str, Tensor]:
    """The projectors on the top-k right singular vectors, from a float64 SVD on the CPU."""
    found, layers = {}, list(model)
    for index, above in enumerate(layers[2::2]):
        s = torch.nn.Sequential(*layers[: 2 * index + 1])(x)[:SAMPLES]
        W = (above.weight.detach() * (s > 0)[:, None, :]).double().cpu()
        Vh = torch.linalg.svd(W, full_matrices=False)[2][:, : guess.k]
        found[str(2 * index)] = (Vh.mT @ Vh).to(x.device, x.dtype)
    return found


@torch.no_grad()
def errors(config: TrainConfig, model: torch.nn.Module) -> list[dict[str, Any]]:
    data = load(config.data).to(config.device, torch.float32)
    x, y = data.x_train[: config.batch], data.y_train[: config.batch]
    exact = definition(model, gg.WPerp(), x)
    rows = []
    for name, guess in GUESSES.items():
        for site, found in covariances(model, guess, x, y).items():
            error = torch.linalg.matrix_norm((found - exact[site]).double().cpu(), 2)
            passed = found.diagonal(dim1=-2, dim2=-1).sum(-1)
            rows.append(
                {
                    "guess": name,
                    "layer": int(site) // 2 + 1,
                    "median": float(error.median()),
                    "worst": float(error.max()),
                    "directions": float(passed.mean()),
                }
            )
    return rows


def main(out: str, *runs: str) -> None:
    records = []
    for run in map(Path, runs):
        config = TrainConfig.from_dict(json.loads((run / "config.json").read_text()))
        data = load(config.data).to(config.device, torch.float32)
        model = build_model(config, data)
        about = {"method": config.method, "width": config.width, "seed": config.seed}
        records += [about | {"epoch": 0} | row for row in errors(config, model)]
        stored = checkpoint.load(run)
        assert stored is not None, f"{run} has no checkpoint"
        model.load_state_dict(checkpoint.by_part(stored[0])["model"])
        records += [about | {"epoch": stored[1]["epoch"]} | row for row in errors(config, model)]
    device = TrainConfig.from_dict(json.loads((Path(runs[0]) / "config.json").read_text())).device
    about = {"samples": SAMPLES, "environment": environment.describe(device)}
    record = {"schema": 1, "kind": "projector", **about, "rows": records, "growth": []}
    keep(record, Path(out).parent, Path(out).stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
