"""`torchrun -m gradguess train`: the same run on any number of processes, and after the death of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waiting import until

pytestmark = pytest.mark.slow
OPTIONS = ["--data", "mnist1d", "--method", "wperp", "--width", "16", "--batch", "512", "--lr", "1e-3", "--json"]


def launch(ranks: int, *command: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def start(ranks: int, out: Path, *more: str, restarts: int = 0) -> subprocess.Popen[str]:
    run = ["-m", "gradguess", "train", *OPTIONS, "--out", str(out)]
    return launch(ranks, "--max-restarts", str(restarts), *run, *more)


def finish(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    lines = out.strip().splitlines()
    assert len(lines) == 1  # rank 0 alone speaks
    return json.loads(lines[0])


def scores(record: dict[str, Any]) -> dict[str, float]:
    return {name: record[name] for name in ("train_loss", "test_loss", "train_accuracy", "test_accuracy")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, float]:
    return scores(finish(start(1, tmp_path_factory.mktemp("alone") / "run", "--epochs", "4")))


def test_two_processes_train_as_one_does(alone, tmp_path):
    found = scores(finish(start(2, tmp_path / "run", "--epochs", "4")))
    assert found == pytest.approx(alone, rel=1e-4)


def test_a_rank_that_dies_is_started_again_and_the_run_goes_on(tmp_path):
    """60 epochs: the kill falls in the middle; whatever was logged before it is not run again."""
    out = tmp_path / "run"
    run = start(2, out, "--epochs", "60", restarts=1)
    until(lambda: (out / "checkpoint.json").exists())
    before = json.loads((out / "checkpoint.json").read_text())["epoch"]
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    record = finish(run)
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, 61))
    assert 0 < before < 60
    unbroken = scores(finish(start(2, tmp_path / "unbroken", "--epochs", "60")))
    assert scores(record) == unbroken


def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path):
    out = tmp_path / "run"
    run = start(2, out, "--epochs", "60")
    until(lambda: (out / "checkpoint.json").exists())
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    epoch = json.loads((out / "checkpoint.json").read_text())["epoch"]
    record = finish(start(1, out, "--epochs", "60"))
    assert 0 < epoch < 60
    assert record["epochs"] == 60


def test_every_rank_stops_when_the_directory_is_anothers(tmp_path):
    finish(start(1, tmp_path / "run", "--epochs", "1"))
    run = start(2, tmp_path / "run", "--epochs", "2")
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "belongs to another configuration" in err


LEAVES = """
import os, sys
from pathlib import Path
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.train import train

train(TrainConfig(method="wperp", width=8, depth=1, epochs=1, batch=1000, k=2))
threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(threads))
"""


def test_no_thread_of_the_group_outlives_the_run(tmp_path):
    """One that still has a tensor to drop when the interpreter ends would abort a rank that has done its work."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    run = launch(2, str(script), str(tmp_path))
    _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    for rank in "01":
        assert "gloo" not in (tmp_path / rank).read_text()
