"""Results as a training run would leave them, made up: the paper's numbers plus a little noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradguess_lab.paper_numbers import ENTRIES, SETTING
from gradguess_lab.tables.runs import Run, flat

Record = dict[str, Any]

ENVIRONMENT = {
    "gradguess": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "device": "cpu",
    "threads": 1,
    "platform": "Linux x86_64",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "clean": True,
}
EPOCHS = (0, 1, 3, 10, 30, 100, 200, 300)  # at which a run is diagnosed


def record(method: str = "wperp", width: int = 128, seed: int = 0, key: str | None = None, **config: Any) -> Record:
    """One result; keywords that name a metric set it, all others go into the configuration."""
    metrics = {
        "train_accuracy": 0.3,
        "train_accuracy_before_last": 0.3,
        "test_accuracy": 0.28,
        "train_loss": 1.9,
        "test_loss": 2.0,
        "step_ms": 2.5,
        "epochs": 300,
        "seconds": 30.0,
        "peak_memory_mb": 12.0,
    }
    if "train_accuracy" in config:
        config.setdefault("train_accuracy_before_last", config["train_accuracy"])
    more = config.pop("more", {})  # further metrics
    metrics |= more | {name: config.pop(name) for name in list(config) if name in metrics and name != "epochs"}
    experiments = config.pop("experiments", ())
    solver = "subspace" if method in {"wperp", "wperp-bottom"} else "shared"
    full = {**SETTING, "k": 10, "solver": solver, "refresh": 50, "device": "cpu"}
    full |= {"script": "", "threshold": "nearest"}
    full |= {"method": method, "width": width, "seed": seed, **config}
    name = key or "-".join(f"{part}{full[part]}" for part in ("method", "width", "k", "solver", "script", "seed"))
    return {
        "schema": 1,
        "key": name,
        "experiments": experiments,
        "config": full,
        "metrics": metrics,
        "history": history(metrics),
        "diagnostics": [],
        "environment": ENVIRONMENT,
    }


def history(metrics: dict[str, float], epochs: int = 300) -> list[Record]:
    """Curves that end in the final metrics."""
    rows = []
    for epoch in range(0, epochs + 1, 10):
        done = 1 - math.exp(-4 * epoch / epochs)
        row: Record = {"epoch": epoch, "seconds": 0.1 * epoch}
        row |= {name: 2.3 + (metrics[name] - 2.3) * done for name in ("train_loss", "test_loss")}
        row |= {name: 0.1 + (metrics[name] - 0.1) * done for name in ("train_accuracy", "test_accuracy")}
        rows.append(row)
    return rows


def site(width: int, rank: int, **values: float) -> Record:
    """Diagnostics of one site; most of the overlap lies in the first ten directions."""
    overlap = [min(1.0, 1 - math.exp(-0.25 * k)) if k < rank else 1.0 for k in range(1, width + 1)]
    base = {"bias": 1e-4, "variance": 1e-5, "covariance_norm": 0.085, "cosine": 0.1, "gradient_norm": 1e-3}
    return {**base, "rank": rank, "overlap": overlap, **values}


def diagnosed(result: Record, last_batch: Record | None = None, **values: float) -> Record:
    """The same result with diagnostics of its three layers over training; `values` are those of layer 1.

    `last_batch` are those of layer 1 on the last batch of an epoch; the same ones where it is not given.
    """
    width = result["config"]["width"]

    def sites(first: Record) -> Record:
        return {"0": site(width, width // 2, **first), "2": site(width, 3 * width // 4), "4": site(width, 10)}

    rows = [{"epoch": e, "sites": sites(values), "last_batch": sites({**values, **(last_batch or {})})} for e in EPOCHS]
    config = {**result["config"], "diagnose": ",".join(map(str, EPOCHS))}
    return {**result, "config": config, "diagnostics": rows}


def paper_records(seeds: int = 3, noise: float = 0.004) -> list[Record]:
    """A run for every entry of the paper, with its published numbers scattered by `noise`."""
    draw = random.Random(0)
    wanted: dict[tuple[str, int, Any], dict[str, float]] = {}
    for entry in ENTRIES:
        wanted.setdefault((entry.method, entry.width, entry.k), {})[entry.quantity] = entry.value
    records = []
    for (method, width, k), numbers in wanted.items():
        for seed in range(seeds):
            moved = {
                name: value + draw.gauss(0, noise) if name.endswith("accuracy") else value * draw.uniform(0.95, 1.05)
                for name, value in numbers.items()
            }
            final = {name: moved.pop(name) for name in list(moved) if name.endswith("accuracy")}
            final |= {"seconds": 40.0 + width / 10} if moved.pop("seconds", None) else {}
            moved.pop("rank", None)
            result = record(method, width, seed, k=k or 10, **final)
            records.append(diagnosed(result, **moved))
    return records


def write(directory: Path, records: Iterable[Record]) -> Path:
    """One folder per run, as training leaves them."""
    for number, result in enumerate(records):
        folder = directory / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
    return directory


def runs(*records: Record) -> list[Run]:
    """As `load_runs` reads them."""
    return [flat(record) for record in records]
