"""`gradguess compare`: what is run, which rate is chosen, what a kill costs, and what is shown."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradguess.errors import InputError
from gradguess_lab import train as training
from gradguess_lab.compare import plan, run, tables, tasks
from gradguess_lab.compare.plan import Comparison, best
from gradguess_lab.compare.run import compare
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import read_json, write_json
from gradguess_lab.run_many import run_directory

SMALL = Comparison(["mlp-mnist1d"], ["frozen"], epochs=4, seeds=2, grid=(1e-3, 1e-2), width=8, samples=200)


@pytest.fixture
def untimed(monkeypatch):
    """No step is timed: that takes a process of its own."""

    def costs(name: str, task: Any, methods: Any, seconds: float, out: Path, say: Any) -> dict[str, Any]:
        return {method: {"ratio": 1.0 + i, "step_ms": 2.0, "peak_mb": 4.0 + i} for i, method in enumerate(methods)}

    monkeypatch.setattr(run, "costs", costs)


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The keys of the runs that were trained, in order."""
    keys: list[str] = []
    real = training.train

    def train(config: Any, out: Any) -> Any:
        keys.append(config.key)
        return real(config, out)

    monkeypatch.setattr(training, "train", train)
    return keys


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ["mlp-mnist"]}, "unknown task 'mlp-mnist'. Did you mean 'mlp-mnist1d'"),
        ({"methods": ["dfaa"]}, "unknown method 'dfaa'. Did you mean 'dfa'"),
        ({"seeds": 0}, "seeds: expected a whole number of at least 1"),
        ({"epochs": -1}, "epochs: expected a whole number of at least 0"),
        ({"grid": (1e-3, -1.0)}, "grid: expected positive learning rates"),
    ],
)
def test_what_cannot_be_run_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changed)


# --- the choice ----------------------------------------------------------------------------------------------------


def test_the_best_rate():
    assert best({1e-3: 0.5, 1e-2: 0.7, 1e-1: math.nan}, less=False) == 1e-2
    assert best({1e-3: 0.5, 1e-2: 0.7}, less=True) == 1e-3
    assert best({1e-2: 0.7, 1e-3: 0.7}, less=False) == 1e-3  # the smaller one of two that are equal
    assert best({1e-2: math.inf}, less=True) is None
    assert best({}, less=True) is None


def store(out: Path, config: Any, **metrics: float) -> None:
    directory = run_directory(out, config)
    directory.mkdir(parents=True)
    write_json(directory / "result.json", {"key": config.key, "config": config.as_dict(), "metrics": metrics})


@pytest.mark.parametrize(("task", "wanted"), [("mlp-mnist1d", 1e-2), ("charformer-shakespeare", 1e-3)])
def test_a_text_is_judged_by_bits_of_which_fewer_are_better(task, wanted, tmp_path):
    chosen, entry = dataclasses.replace(SMALL, tasks=[task]), (task, "frozen")
    for config, score in zip(chosen.tuning(entry), (2.0, 3.0), strict=True):
        store(tmp_path, config, test_accuracy=score, test_bits=score)
    assert chosen.best_rate(tmp_path, entry) == wanted


def test_a_rate_whose_run_did_not_end_is_not_chosen(tmp_path):
    entry = ("mlp-mnist1d", "frozen")
    assert SMALL.best_rate(tmp_path, entry) is None
    store(tmp_path, SMALL.tuning(entry)[0], test_accuracy=0.1)
    assert SMALL.best_rate(tmp_path, entry) == 1e-3
    assert dataclasses.replace(SMALL, grid=(0.5,)).best_rate(tmp_path, entry) == 0.5


# --- running -------------------------------------------------------------------------------------------------------


def test_a_comparison_is_made_once(tmp_path, untimed, trained):
    record = compare(SMALL, tmp_path)
    assert len(trained) == len(set(trained)) == 2 * (2 + 2)
    (task,) = record["tasks"]
    assert [row["method"] for row in task["rows"]] == ["backprop", "frozen"]
    for row in task["rows"]:
        assert len(row["test"]) == len(row["train"]) == 2
        assert row["lr"] in SMALL.grid
        assert [rate for rate, _ in row["scores"]] == list(SMALL.grid)
    assert task["rows"][0]["cosine"] == pytest.approx(1.0)
    assert task["rows"][1]["cosine"] is None  # nothing reaches the parameters below the lowest cut
    assert task["rows"][1]["memory_ratio"] == 5 / 4
    assert read_json(tmp_path / "compare.json", "comparison") == json.loads(json.dumps(record))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 8
    assert compare(SMALL, tmp_path) == record
    assert len(trained) == 8  # nothing was run again


def test_another_seed_or_method_adds_its_runs_alone(tmp_path, untimed, trained):
    compare(SMALL, tmp_path)
    trained.clear()
    compare(dataclasses.replace(SMALL, seeds=3), tmp_path)
    assert len(trained) == 2
    assert all("-s2-" in key for key in trained)


@pytest.mark.slow
def test_a_killed_comparison_goes_on(tmp_path, untimed, trained):
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
    assert not {path.parent.name for path in finished} & set(trained)
    assert [len(row["test"]) for row in record["tasks"][0]["rows"]] == [2, 2]


def test_a_run_that_diverges_is_said_and_not_tried_again(tmp_path, untimed, trained):
    chosen = dataclasses.replace(SMALL, methods=[], grid=(1e30,), seeds=1)
    chosen = dataclasses.replace(chosen, methods=["backprop"])
    record = compare(chosen, tmp_path)
    row = record["tasks"][0]["rows"][0]
    assert row["test"] == []
    assert row["diverged"] == 1
    assert "NaN or infinite" in row["failed"]
    assert len(trained) == 1
    assert compare(chosen, tmp_path) == record
    assert len(trained) == 1


def test_a_method_that_refuses_a_task_says_why(tmp_path, untimed, monkeypatch):
    text = tasks.Task("Text", TrainConfig(data="shakespeare", model="charformer", depth=2, batch=100), 2)
    for module in (plan, run):
        monkeypatch.setitem(module.TASKS, "text", text)
    chosen = Comparison(["text"], ["local-predsim"], epochs=1, seeds=1, grid=(1e-3,), width=4, samples=100)
    record = compare(chosen, tmp_path)
    rows = {row["method"]: row for row in record["tasks"][0]["rows"]}
    assert record["tasks"][0]["quantity"] == "bits"
    assert rows["backprop"]["test"][0] > 1
    assert rows["local-predsim"]["failed"].startswith("PredSim compares the classes of samples")
    (one,) = tables.compared(record)
    assert one.table.rows[1][0].note.startswith("PredSim compares the classes of samples")


# --- what is shown -------------------------------------------------------------------------------------------------


def row(method: str, test: list[float], **more: Any) -> dict[str, Any]:
    known = {"sends": "nothing", "control": False, "lr": 1e-3, "scores": [], "train": test, "diverged": 0, "failed": ""}
    return {"method": method, "test": test, **known, **more}


@pytest.fixture
def record() -> dict[str, Any]:
    made = run._record(SMALL, {}, {})
    made["tasks"][0]["rows"] = [
        row("backprop", [0.6, 0.62], sends="all", ratio=1.0, memory_ratio=1.0, cosine=1.0),
        row("dfa", [0.5, 0.54], ratio=0.9, memory_ratio=0.8, cosine=0.2),
        row("frozen", [0.3, 0.3], control=True, ratio=0.5, memory_ratio=0.4, cosine=None, diverged=1),
        row("local-predsim", [], lr=None, failed="PredSim needs classes. Use another."),
    ]
    return made
