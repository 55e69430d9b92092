"""The benchmark on real networks: compiled loops, processes that take turns, and what is measured once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from gradguess.errors import GradguessError
from gradguess.methods import compiled
from gradguess_lab import environment
from gradguess_lab.bench import bench_tasks, real_networks, tasks, timing
from gradguess_lab.bench.cases import RealCase
from gradguess_lab.bench.memory import EXACT, run_apart
from gradguess_lab.bench.registry import make_loop
from gradguess_lab.bench.tasks import Job, time_task
from gradguess_lab.config import TrainConfig
from traced_graphs import as_compiled

pytest.importorskip("mnist1d")
SMALL = TrainConfig(model="residual", data="mnist1d", width=8, depth=2, batch=16)


@pytest.fixture
def small(monkeypatch):
    """Two small tasks in place of the eight."""
    monkeypatch.setattr(real_networks, "TASKS", {"small": SMALL, "smaller": dataclasses.replace(SMALL, depth=1)})
    monkeypatch.setattr(real_networks, "REAL", {"small": SMALL, "smaller": dataclasses.replace(SMALL, depth=1)})


@pytest.fixture
def graphs_alone(monkeypatch):
    """Nothing is compiled in this process: graphs run as they are."""
    monkeypatch.setattr(compiled, "compiled", as_compiled)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def measured(job: Job) -> list[dict]:
    """Rows as a process makes them, quicker."""
    times = {"step_ms": 2.0, "quiet_ms": 2.0, "refresh_ms": 0.0, "ratio": 1.0, "quiet_ratio": 1.0, "rounds": 5}
    return [
        {"method": method, "task": job.name, "mode": mode, "device": "cpu", **times}
        | {"ratios": {"eager": 1.5, "compiled": 2.5}, "peak_mb": 3.0, "start_s": 4.0, "notes": []}
        for method in ("backprop", *job.methods)
        for mode in job.modes
    ]


def by_name(jobs, together, say):
    for name, job in jobs.items():
        say(name)
        yield name, measured(job)


# --- loops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["backprop", "wperp", "feedback-chained-rare"])
def test_compiled_loops_make_the_same_steps(method, graphs_alone):
    case = RealCase(dataclasses.replace(SMALL, dtype="float64"))
    found = []
    for is_compiled in (False, True):
        loop = make_loop(method, case, is_compiled)
        timing.first_rounds(loop, "cpu")
        found.append(list(loop.model.parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# --- one task ------------------------------------------------------------------------------------------------------


def test_a_row_has_the_ratio_to_backprop_in_every_mode(graphs_alone):
    rows = time_task(Job("small", SMALL, ["mezo", "checkpoint-all"], compile=True, seconds=0.0))
    assert [(row["method"], row["mode"]) for row in rows] == [
        *(("backprop", "eager"), ("backprop", "compiled"), ("mezo", "eager"), ("mezo", "compiled")),
        ("checkpoint-all", "eager"),
    ]
    for row in rows:
        assert row["ratio"] == row["ratios"]["eager"]
        assert set(row["ratios"]) == {"eager", "compiled"}
        assert row["step_ms"] > 0
        assert row["peak_mb"] is None
    assert rows[0]["ratios"]["eager"] == rows[1]["ratios"]["compiled"] == 1


@pytest.mark.slow
def test_peak_memory_of_each_loop_in_a_process():
    """Recomputing keeps less than backpropagation, and MeZO least of all."""
    task = TrainConfig(model="mlp", data="mnist1d", width=64, depth=24, batch=2048)
    job = Job("deep", task, ["checkpoint-sqrt", "mezo"], compile=False, seconds=0.0)
    plain, again, mezo = run_apart("deep", [tasks.__name__, "peaks", job.as_json()], EXACT)
    assert 12 < plain < 16  # 24 layers of 0.5 MB, and the gradients
    assert again < 0.7 * plain
    assert mezo < 0.3 * plain


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_take_turns_and_one_that_fails_is_named(tmp_path: Path, monkeypatch):
    broken = dataclasses.replace(SMALL, data="shakespeare")
    monkeypatch.setattr(real_networks, "TASKS", {"broken": broken, "small": SMALL})
    monkeypatch.setattr(real_networks, "REAL", {"broken": broken, "small": SMALL})
    said: list[str] = []
    with pytest.raises(GradguessError, match=r"^timing broken failed: .*reads numbers, not text"):
        bench_tasks(seconds=0.0, methods=["wt"], jobs=2, out=tmp_path, say=said.append)
    assert said == ["starting broken, small", "timing broken", "timing small"]
    found = json.loads((tmp_path / "tasks-cpu.json").read_text())  # what did not fail
    assert [(row["task"], row["method"]) for row in found["rows"]] == [("small", "backprop"), ("small", "wt")]
    assert {"commit", "clean", "torch", "threads"} <= set(found["environment"])


def test_what_is_measured_is_not_measured_again(small, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(real_networks, "in_turns", by_name)
    said: list[str] = []
    bench_tasks(["smaller"], compile=True, out=tmp_path, say=said.append)
    found = bench_tasks(compile=True, out=tmp_path, say=said.append)
    assert said == ["smaller", "small"]
    assert list(dict.fromkeys(row["task"] for row in found["rows"])) == ["small", "smaller"]
    assert bench_tasks(compile=True, out=tmp_path, say=said.append)["rows"] == found["rows"]
    assert len(said) == 2
    bench_tasks(compile=True, seconds=1.0, out=tmp_path, say=said.append)  # other settings
    assert said[2:] == ["small", "smaller"]
    other = environment.describe("cpu") | {"commit": "another"}
    monkeypatch.setattr(environment, "describe", lambda device: dict(other))
    bench_tasks(["small"], compile=True, seconds=1.0, out=tmp_path, say=said.append)  # other code
    assert said[4:] == ["small"]


# --- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--compile", "--starts"])
def test_the_command_names_what_is_missing(option):
    testing = pytest.importorskip("typer.testing")
    from gradguess_lab.cli import app

    result = testing.CliRunner().invoke(app, ["bench", option])
    assert isinstance(result.exception, GradguessError)
    assert "need --task" in str(result.exception)
