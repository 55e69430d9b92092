"""`torchrun -m gradguess train`: the same run on any number of processes, and after the death of one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradguess_lab import checkpoint
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import train
from waiting import until

pytestmark = pytest.mark.slow
CONFIG = TrainConfig(data="mnist1d", method="wperp", width=16, batch=512, lr=1e-3, epochs=40, eval_every=4)
SCORES = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")


def launch(ranks: int, *command: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def start(ranks: int, out: Path, restarts: int = 0, **changes: Any) -> subprocess.Popen[str]:
    config = dataclasses.replace(CONFIG, **changes).as_dict()
    named = [part for name, value in config.items() if value != getattr(TrainConfig(), name) for part in (name, value)]
    options = [f"--{part.replace('_', '-')}" if i % 2 == 0 else str(part) for i, part in enumerate(named)]
    return launch(
        ranks, "--max-restarts", str(restarts), "-m", "gradguess", "train", *options, "--json", "--out", str(out)
    )


def finish(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    lines = out.strip().splitlines()
    assert len(lines) == 1  # rank 0 alone speaks
    return json.loads(lines[0])


def scores(record: dict[str, Any]) -> dict[str, float]:
    return {name: record[name] for name in SCORES}


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


SCRIPT = """
import json, os, shutil, sys
from pathlib import Path
from gradguess_lab import checkpoint
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import train

here = Path(sys.argv[1])

def keep(row):
    if row["epoch"] == 20:
        shutil.copytree(here / "run", here / "half")

train(TrainConfig(**json.loads(sys.argv[2])), here / "run", keep)
threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
(here / os.environ["RANK"]).write_text(" ".join(threads))
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by two ranks, in `run`; after 20 epochs, in `half`; the threads that the ranks end with, in 0 and 1."""
    here = tmp_path_factory.mktemp("unbroken")
    (here / "script.py").write_text(SCRIPT)
    run = launch(2, str(here / "script.py"), str(here), json.dumps(CONFIG.as_dict()))
    _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    return here


def test_two_processes_train_as_one_does(unbroken: Path):
    (alone,) = train(dataclasses.replace(CONFIG, epochs=4))["history"]
    assert scores(logged(unbroken / "run")[3]) == pytest.approx(scores(alone), rel=1e-4)


def test_a_rank_that_dies_is_started_again_and_the_run_goes_on(unbroken: Path, tmp_path: Path):
    """The kill falls in the middle; whatever was logged before it is not run again."""
    out = tmp_path / "run"
    run = start(2, out, restarts=1)
    until((out / checkpoint.FILE).exists)
    before = len(checkpoint.load(out)[1]["rows"])
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    record = finish(run)
    assert 0 < before < 40
    assert [row["epoch"] for row in logged(out)] == list(range(1, 41))
    assert scores(record) == scores(json.loads((unbroken / "run" / "result.json").read_text())["metrics"])


def test_a_checkpoint_goes_on_with_another_number_of_processes(unbroken: Path, tmp_path: Path):
    out = Path(shutil.copytree(unbroken / "half", tmp_path / "run"))
    done = logged(out)
    assert len(done) == 20
    assert finish(start(1, out))["epochs"] == 40
    assert logged(out)[:20] == done
    assert logged(out)[23]["test_loss"] == pytest.approx(logged(unbroken / "run")[23]["test_loss"], rel=1e-3)


def test_every_rank_stops_when_the_directory_is_anothers(unbroken: Path):
    run = start(2, unbroken / "run", epochs=2)
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "belongs to another configuration" in err


def test_no_thread_of_the_group_outlives_the_run(unbroken: Path):
    """One that still has a tensor to drop when the interpreter ends would abort a rank that has done its work."""
    for rank in "01":
        assert "gloo" not in (unbroken / rank).read_text()
