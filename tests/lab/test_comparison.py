"""`gradguess compare`: what is run, which rate is chosen, what a kill costs, and what the record says."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradguess.errors import GradguessError
from gradguess_lab import store
from gradguess_lab import train as training
from gradguess_lab.bench import run as bench
from gradguess_lab.compare.run import HOLDOUT, Comparison, compare, read_record
from gradguess_lab.config import TrainConfig

SMALL = Comparison(["mlp-mnist1d"], ["frozen"], epochs=4, seeds=2, grid=(1e-3, 1e-2), width=8, samples=200)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch):
    """No step is timed: that takes a process of its own."""

    def rows(cases: Any, together: int) -> Any:
        for one in cases:
            costs = {"task": one.name, "case": one.config.key, "ratio": 1.0, "step_ms": 2.0}
            yield one, [{"method": m, **costs, "peak_mb": 4.0 + i} for i, m in enumerate(one.methods)]

    monkeypatch.setattr(bench, "in_turns", rows)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The runs that were trained, in order."""
    made: list[TrainConfig] = []
    real = training.train

    def train(config: Any, out: Any) -> Any:
        made.append(config)
        return real(config, out)

    monkeypatch.setattr(training, "train", train)
    return made


def test_a_comparison_is_made_once(tmp_path: Path, untimed: None, trained: list[TrainConfig]):
    record = compare(SMALL, tmp_path)
    assert len(trained) == len({config.key for config in trained}) == 2 * (2 + 2)
    # rates are chosen on held out training samples, with a seed of their own, and never on the test set
    assert {(c.epochs, c.seed, c.holdout) for c in trained} == {(1, 100, HOLDOUT), (4, 0, 0.0), (4, 1, 0.0)}
    (task,) = record["tasks"]
    assert [row["method"] for row in task["rows"]] == ["backprop", "frozen"]
    for row in task["rows"]:
        assert len(row["test"]) == len(row["train"]) == 2
        assert row["lr"] in SMALL.grid
        assert [rate for rate, _ in row["scores"]] == list(SMALL.grid)
    assert task["rows"][0]["cosine"] == pytest.approx(1.0)
    assert task["rows"][1]["cosine"] is None  # nothing reaches the parameters below the lowest cut
    assert task["rows"][1]["memory_ratio"] == 5 / 4
    assert read_record(tmp_path) == record
    assert compare(SMALL, tmp_path) == record
    assert len(trained) == 8  # nothing was run again
    compare(dataclasses.replace(SMALL, seeds=3), tmp_path)
    assert [config.seed for config in trained[8:]] == [2, 2]
    store.main(tmp_path)  # put into the study, it says the same
    stored = {row["key"]: row for row in store.read(tmp_path)}
    assert len(stored) == 11
    with pytest.raises(GradguessError, match="holds no comparison"):
        read_record(tmp_path / "none")


@pytest.mark.slow
def test_a_killed_comparison_goes_on(tmp_path: Path, untimed: None, trained: list[TrainConfig]):
    words = ["compare", "--tasks", "mlp-mnist1d", "--methods", "frozen", "--epochs", "4", "--seeds", "2", "--jobs", "1"]
    words += ["--grid", "1e-3,1e-2", "--width", "8", "--samples", "200", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "gradguess", *words], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (first := list(tmp_path.glob("runs/*/result.json"))) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert first
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    record = compare(SMALL, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert not {path.parent.name for path in finished} & {config.key for config in trained}
    assert [len(row["test"]) for row in record["tasks"][0]["rows"]] == [2, 2]
