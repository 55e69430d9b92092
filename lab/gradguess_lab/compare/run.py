"""Methods × tasks at equal epochs: which runs are made, which rate each method gets, what a step costs.

For every task and method, short runs with a seed of their own choose one rate out of the same few, by a part of the
training samples that is held out. Runs of full length at that rate, with seeds 0, 1, …, are reported on the test set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradguess.errors import GradguessError, check_choice, check_count
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task as Batch
from gradguess_lab import checkpoint, store
from gradguess_lab.bench.loops import Loop
from gradguess_lab.bench.run import bench
from gradguess_lab.config import TrainConfig
from gradguess_lab.jobs import Job, Plan, Row, run_plans, tuned
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.methods import entry_of, tried_by
from gradguess_lab.tasks import TASKS, Task, used_in
from gradguess_lab.train import autocast

SEEDS = 3
TUNING_SEED = 100
HOLDOUT = 0.1  # of the training samples, by which rates are chosen
SHORT = 4  # a run that chooses a learning rate has this part of the epochs
COSTS = ("ratio", "step_ms", "peak_mb")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """What was asked for. An empty grid is each task's own, as are an `epochs`, `width` and `samples` of 0."""

    tasks: Sequence[str] = ()
    methods: Sequence[str] = ()
    epochs: int = 0
    seeds: int = SEEDS
    grid: Sequence[float] = ()
    device: str = "cpu"
    width: int = 0
    samples: int = 0

    @property
    def entries(self) -> list[tuple[str, str]]:
        """Every task with every method."""
        methods = dict.fromkeys(("backprop", *(self.methods or tried_by("compare"))))
        return [(task, method) for task in self.tasks or used_in("compare") for method in methods]

    def job(self, task: str, method: str) -> Job:
        """A run of a method on a task, at no rate in particular."""
        own = TASKS[check_choice("task", task, TASKS)]
        changed = {key: getattr(self, key) for key in ("epochs", "width", "samples") if getattr(self, key)}
        changed |= {"device": self.device, **own.settings(method)}
        return Job("compare", task, method, dataclasses.replace(own.config, **changed))

    def plan(self, task: str, method: str) -> Plan:
        """The runs of a method on a task."""
        check_count("seeds", self.seeds)
        job, seeds = self.job(task, method), [{"seed": seed} for seed in range(self.seeds)]
        short = {"epochs": max(1, job.settings.epochs // SHORT), "seed": TUNING_SEED, "holdout": HOLDOUT}
        return tuned(job, self.grid or TASKS[task].rates, [short], seeds, partial(loss, TASKS[task].quantity))

    def listed(self, task: str, method: str) -> str:
        """The same in words."""
        config, first = self.job(task, method).settings, next(self.plan(task, method))
        short = f"{len(first)} runs of {first[0].settings.epochs} epochs, then "
        tuning = short if first[0].role == "tuning" else ""
        return f"{tuning}{self.seeds} of {config.epochs} epochs, sites {config.sites}, on {config.device}"


def loss(quantity: str, row: Row) -> float:
    """What a rate is judged by, the less the better."""
    score = row["metrics"].get(f"test_{quantity}", math.nan)
    return score if quantity == "bits" else -score


def compare(asked: Comparison, out: Path, seconds: float = 3.0, say: Say = lambda words: None, **how: Any) -> Row:
    """Make what is missing of the runs and the measurements, and return the record of all that `out` holds.

    Killed at any time, it goes on from there when it is called again; `how` are further arguments of `run_plans`.
    """
    rows, _ = run_plans([asked.plan(*entry) for entry in asked.entries], out, **how)
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["role"] == "reported" and not row.get("failed"):
            first.setdefault((row["task"], row["variant"]), row)
    for task in dict.fromkeys(task for task, _ in first):
        methods = [method for name, method in first if name == task]
        plain = dataclasses.replace(asked.job(task, "backprop").settings, method=TrainConfig.method)
        bench("compare", {task: plain}, methods, seconds, memory=True, out=out / "bench", say=say, name=task)
        for method in methods:
            row = first[task, method]
            if "cosine" not in row["metrics"]:
                say(f"{task}: cosine of {method}")
                found = cosine(TrainConfig.from_dict(row["config"]), TASKS[task].pieces, out / "runs" / row["key"])
                row["metrics"] |= {} if found is None else {"cosine": found}
    store.keep(out, rows)
    return read_record(out)


def cosine(config: TrainConfig, pieces: int, directory: Path) -> float | None:
    """Between a method's gradient and the true one, of the parameters below the lowest cut, on the first batch.

    The network and what the method has learned are those of the last checkpoint in `directory`; None without one.
    """
    stored = checkpoint.load(directory)
    if stored is None:
        return None
    batch = min(config.batch, config.samples or config.batch)
    parts, loop = checkpoint.by_part(stored[0]), Loop(dataclasses.replace(config, batch=batch))
    model, forward, x, y = loop.model, loop.forward, loop.x, loop.y
    assert forward is not None
    model.load_state_dict(parts["model"])
    forward.load_state_dict(parts.get("forward", {}))
    below = lay_out(Batch(model, per_sample_loss, x, y), pieces).guessed[0].parameters
    weights = [weight for name, weight in model.named_parameters() if name in below]
    with autocast(config):
        forward(per_sample_loss, x, y)
        mean = per_sample_loss(model(x), y).mean()
    found = [weight.grad for weight in weights], torch.autograd.grad(mean, weights)
    ours, true = (
        torch.cat([w.new_zeros(w.numel()) if g is None else g.flatten() for w, g in zip(weights, grads, strict=True)])
        for grads in found
    )
    size = float(ours.double().norm() * true.double().norm())
    return float(ours.double() @ true.double()) / size if size else None


def read_record(out: Path) -> Row:
    """The comparison that a directory holds, or that is stored: for every task a line for each method."""
    rows = [row for row in store.rows(out).values() if "compare" in row.get("experiments", ())]
    if not rows:
        raise GradguessError(f"{out} holds no comparison: make one by `gradguess compare --out {out}`.")
    by_task = {name: [row for row in rows if row["task"] == name] for name in (*TASKS, *(row["task"] for row in rows))}
    return {"kind": "comparison", "tasks": [_task(out, name, own) for name, own in by_task.items() if own]}


def _task(out: Path, name: str, rows: Sequence[Row]) -> Row:
    task = TASKS.get(name, Task(name, TrainConfig(), pieces=0))
    roles = {role: [row for row in rows if row["role"] == role] for role in ("tuning", "reported")}
    timed = (store.find(out, f"bench/{name}") or {"rows": []})["rows"]
    costs = {row["method"]: {key: row[key] for key in COSTS} for row in timed}
    base = costs.get("backprop", {}).get("peak_mb")
    lines = []
    for method in dict.fromkeys(row["variant"] for row in rows):
        tried, ours = ([row for row in of_role if row["variant"] == method] for of_role in roles.values())
        ended = [row["metrics"] for row in ours if row["metrics"]]
        whys = [row["failed"] for row in rows if row["variant"] == method and row.get("failed")]
        cost, entry = costs.get(method, {}), entry_of(method)
        lines.append({
            "method": method,
            "sends": entry.sends,
            "control": entry.control,
            "lr": ours[0]["config"]["lr"] if ended else None,
            "scores": [[r["config"]["lr"], r["metrics"][f"test_{task.quantity}"]] for r in tried if r["metrics"]],
            "test": [metrics[f"test_{task.quantity}"] for metrics in ended],
            "train": [metrics[f"train_{task.quantity}"] for metrics in ended],
            "diverged": sum("is NaN or infinite" in row.get("failed", "") for row in ours),
            "failed": whys[0] if whys and not ended else "",
            **(cost | {"memory_ratio": cost["peak_mb"] / base if base else None} if ended and cost else {}),
            **({"cosine": ended[0].get("cosine")} if ended else {}),
        })  # fmt: skip
    first, tuning = (roles["reported"] or rows)[0], roles["tuning"]
    return {
        "name": name,
        "title": task.title,
        "pieces": task.pieces,
        "grid": sorted({row["config"]["lr"] for row in tuning or rows}),
        "quantity": task.quantity,
        "short": tuning[0]["config"]["epochs"] if tuning else 0,
        "config": first["config"],
        "environment": first.get("environment", {}),
        "rows": lines,
    }
