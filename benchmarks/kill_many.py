"""Kill a training run at random moments, many times over, and compare what survives with an unbroken run.

    python benchmarks/kill_many.py --kills 100 --out DIR

A kill is SIGKILL at a random moment after the process has begun to write; every other one is aimed at a checkpoint: it
falls while the file beside it exists. The run is survived if at the end its scores and every tensor of its checkpoint
are bit-equal to those of the unbroken run, and its log has every epoch once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gradguess_lab import checkpoint
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import write_json
from gradguess_lab.train import train

CONFIG = TrainConfig(data="digits", method="wperp", width=16, depth=2, batch=256, k=3, epochs=400)
WORKER = """
import json, sys, torch
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import train
torch.set_num_threads(1)
print("ready", flush=True)
train(TrainConfig(**json.loads(sys.argv[1])), sys.argv[2])
"""


def kill_once(config: TrainConfig, out: Path, chance: random.Random, at_checkpoint: bool) -> str:
    """Start (or continue) the run and kill it: "killed", "killed in a checkpoint", or "finished" before that."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(config.as_dict()), str(out)], stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    before = _epoch(out)
    while worker.poll() is None and _epoch(out) == before:
        time.sleep(0.001)
    moment = time.monotonic() + 0.2 * chance.random()
    while worker.poll() is None and time.monotonic() < moment:
        if at_checkpoint and any(out.glob(".checkpoint*.tmp")):
            break
        if not at_checkpoint:
            time.sleep(0.001)
    aside = any(out.glob(".checkpoint*.tmp"))
    if worker.poll() is not None:
        return "finished"
    worker.kill()
    worker.wait()
    return "killed in a checkpoint" if aside or any(out.glob(".checkpoint*.tmp")) else "killed"


def _epoch(out: Path) -> int:
    stored = checkpoint.load(out)
    return stored[1]["epoch"] if stored else 0


def survived(out: Path, unbroken: Path, record: dict[str, object], wanted: dict[str, object]) -> bool:
    ours, theirs = checkpoint.load(out), checkpoint.load(unbroken)
    assert ours is not None
    assert theirs is not None
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    same = ours[0].keys() == theirs[0].keys() and all(torch.equal(ours[0][k], theirs[0][k]) for k in theirs[0])
    return same and epochs == list(range(1, len(epochs) + 1)) and _scores(record) == _scores(wanted)


def _scores(record: dict[str, object]) -> list[object]:
    metrics = record["metrics"]
    assert isinstance(metrics, dict)
    return [metrics[name] for name in ("train_loss", "test_loss", "train_accuracy", "test_accuracy", "epochs")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=10, help="kills before a run is let to its end")
    parser.add_argument("--epochs", type=int, default=CONFIG.epochs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="where the summary goes, as kill_many.json")
    options = parser.parse_args()
    config, chance = dataclasses.replace(CONFIG, epochs=options.epochs), random.Random(options.seed)
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    runs = good = 0
    with tempfile.TemporaryDirectory() as scratch:
        unbroken = Path(scratch) / "unbroken"
        wanted = train(config, unbroken)
        while sum(n for kind, n in counts.items() if kind != "finished") < options.kills:
            out = Path(scratch) / f"run{runs}"
            for number in range(options.per_run):
                kind = kill_once(config, out, chance, at_checkpoint=number % 2 == 1)
                counts[kind] = counts.get(kind, 0) + 1
                if kind == "finished":
                    break
            good += survived(out, unbroken, train(config, out), wanted)
            runs += 1
            print(f"{counts}, {good} of {runs} runs bit-equal", flush=True)
    summary = {"kills": counts, "runs": runs, "survived": good}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "kill_many.json", summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
