"""What a step of each method costs on a task, and how its gradient lies to the true one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradguess.errors import GradguessError
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from gradguess_lab import checkpoint
from gradguess_lab.bench.record import keep, make_record, measured
from gradguess_lab.bench.tasks import Job
from gradguess_lab.bench.turns import in_turns
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.train import autocast, build_forward, build_model

Row = dict[str, Any]
Say = Callable[[str], None]
COSTS = ("ratio", "step_ms", "peak_mb")


def costs(
    name: str, task: TrainConfig, methods: Mapping[str, Mapping[str, Any]], seconds: float, out: Path, say: Say
) -> dict[str, Row]:
    """Time and peak memory of a step by method, all timed in turns in one process; kept in `out`.

    What is there of the same code, machine and settings is not measured again.

    Args:
        methods: with the settings that each has on this task.
        seconds: of timing for each method.
    """
    own = {method: dict(settings) for method, settings in methods.items()}
    settings = {"methods": own, "seconds": seconds, "task": task.as_dict()}
    rows = measured(out, f"{name}.json", task.device, settings)
    if not rows:
        load_before = os.getloadavg()[0]
        job = Job(name, task, list(methods), compile=False, seconds=seconds, memory=True, own=own)
        ((_, found),) = in_turns({name: job}, 1, say)
        if isinstance(found, str):
            raise GradguessError(f"timing {name} failed: {found}")
        rows = found
        record = make_record("compare", rows, task.device, load_before) | {"settings": settings, "growth": []}
        keep(record, out, f"{name}.json")
    return {row["method"]: {key: row[key] for key in COSTS} for row in rows}


def cosine(config: TrainConfig, pieces: int, directory: Path) -> float | None:
    """Between a method's gradient and the true one, of the parameters below the lowest cut, on the first batch.

    The network and what the method has learned are those of the last checkpoint in `directory`; None without one.
    """
    stored = checkpoint.load(directory)
    if stored is None:
        return None
    parts = checkpoint.by_part(stored[0])
    data = load(config.data).first(config.samples).to(config.device, getattr(torch, config.dtype))
    x, y = data.x_train[: config.batch], data.y_train[: config.batch]
    model = build_model(config, data)
    model.load_state_dict(parts["model"])
    forward = build_forward(config, model)
    forward.load_state_dict(parts.get("forward", {}))
    below = lay_out(Task(model, per_sample_loss, x, y), pieces).guessed[0].parameters
    with autocast(config):
        forward(per_sample_loss, x, y)
        ours = _taken(model, below)
        loss = per_sample_loss(model(x), y).mean()
    loss.backward()
    return _cosine(ours, _taken(model, below))


def _taken(model: torch.nn.Module, names: Sequence[str]) -> Tensor:
    """The gradients of some parameters as one vector, after which all are gone."""
    own = dict(model.named_parameters())
    found = [torch.zeros_like(own[name]) if own[name].grad is None else own[name].grad for name in names]
    model.zero_grad(set_to_none=True)
    return torch.cat([g.detach().double().flatten() for g in found if g is not None])


def _cosine(a: Tensor, b: Tensor) -> float | None:
    """None where there is no gradient."""
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else None
