"""One run on a stream: how large the error is, how long a step takes, and what is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradguess.online import LRU, Online, Recurrent
from gradguess_lab.environment import check_device, describe, resident_kilobytes
from gradguess_lab.streams.config import RULES, StreamConfig
from gradguess_lab.streams.tasks import TASKS, Balance

POINTS = 100  # of the curves
TAIL = 0.1  # the part of the run over which the final error is taken
# By start: the gain of orthogonal recurrent weights, and the size of the input's weights beside them. A critical
# network forgets by its tanh alone, and small inputs hardly bend that.
ORTHOGONAL = {"orthogonal": (0.9, 0.5), "critical": (1.0, 0.1)}


def run(config: StreamConfig, on_point: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """The record of a run: `error` at the end, `step_ms`, `memory_mb`, and curves over time.

    `memory_mb` is what is kept from step to step: influence, basis and state. `process_mb`, in the curve, is the
    memory of the whole process.
    """
    check_device(config.device)
    generator = torch.Generator().manual_seed(1000 + config.seed)
    task = TASKS[config.task]
    with torch.random.fork_rng(devices=[]):  # the global generator is left alone
        torch.default_generator.manual_seed(config.seed)
        model = build(config, task.inputs, task.outputs).to(config.device)
    online = Online(model, RULES[config.rule](config), config.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = task.steps(config, generator, online, optimiser)
    curve: list[dict[str, Any]] = []
    recent, tail, times = list[float](), list[float](), list[float]()
    last = config.steps - max(1, int(TAIL * config.steps))
    every = max(1, config.steps // POINTS)
    failed = ""
    for count in range(config.steps):
        began = time.perf_counter()
        try:
            errors = next(steps)
        except ArithmeticError as error:  # the gradient has left all bounds: that is a result, too
            failed = str(error)
            break
        times.append(time.perf_counter() - began)
        recent += errors
        tail += errors if count >= last else []
        if (count + 1) % every == 0:
            point = {"step": count + 1, "error": _mean(recent), "process_mb": resident_kilobytes() * 1.024e-3}
            curve.append(point | {"step_ms": 1000 * sum(times) / len(times)})
            recent, times = [], []
            if on_point is not None:
                on_point(curve[-1])
    return {
        "key": config.key,
        "config": config.as_dict(),
        "error": None if failed else _mean(tail),
        "chance": task.chance,
        "step_ms": _mean([point["step_ms"] for point in curve[1:] or curve]),
        "memory_mb": online.kept_bytes / 1e6,
        "skipped": online.skipped,
        "failed": failed,
        "curve": curve,
        "environment": describe(config.device),
    }


def build(config: StreamConfig, inputs: int, outputs: int) -> nn.Module:
    """The model that a configuration names. An LRU reads out through a hidden layer, since it is linear itself."""
    if config.task == "balancing":
        return Balance()
    width = config.width
    if config.cell == "lru":
        readout = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, outputs))
        return Recurrent(LRU(inputs, width, radius=(0.9, 0.999)), readout)
    cell = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}[config.cell](inputs, width)
    if config.cell == "rnn" and config.start in ORTHOGONAL:
        gain, size = ORTHOGONAL[config.start]
        with torch.no_grad():
            nn.init.orthogonal_(cell.weight_hh, gain)
            cell.weight_ih.normal_(0, size)
            cell.bias_ih.zero_()
            cell.bias_hh.zero_()
    return Recurrent(cell, nn.Linear(width, outputs))


def _mean(values: list[float]) -> float | None:
    """None where there is nothing to average, or no finite number: JSON knows no NaN."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None
