"""Step times of real networks: the variants of the study against a plain loop with `loss.backward()`."""

from __future__ import annotations

import dataclasses

import torch

from gradguess.experiments.bench.loops import BACKPROP, GuessedLoop, Loop
from gradguess.experiments.bench.timing import Times, measure
from gradguess.experiments.data import load
from gradguess.experiments.names import lookup
from gradguess.experiments.real import STUDIED, TASKS
from gradguess.experiments.train import build_model


def time_task(name: str, seconds: float, device: str) -> dict[str, Times]:
    """Times of every variant on a task, and of the plain loop."""
    task = dataclasses.replace(lookup(TASKS, name, "task"), device=device)
    data = load(task.data).first(task.batch).to(device, getattr(torch, task.dtype))
    loops: dict[str, Loop] = {BACKPROP: Loop(build_model(task, data), data.x_train, data.y_train)}
    for variant, settings in STUDIED.items():
        untaught = settings.get("learn") == "never" and not settings.get("bootstrap")  # a control, not a way to train
        if variant != BACKPROP and not untaught:
            config = dataclasses.replace(task, **settings)
            loops[variant] = GuessedLoop(config, build_model(config, data), data.x_train, data.y_train)
    return measure(loops, seconds, device)
