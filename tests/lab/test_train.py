from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradguess.errors import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab import train as train_module
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Dataset, load
from gradguess_lab.files import write_atomic
from gradguess_lab.train import first_losses, train

pytest.importorskip("mnist1d")
pytest.importorskip("safetensors")

SCORES = ("train_accuracy", "test_accuracy", "train_loss", "test_loss")


MEASURED = ("step_ms", "epochs", "seconds", "peak_memory_mb", "train_accuracy_before_last")


def scores(record: dict) -> dict:
    return {name: record["metrics"][name] for name in SCORES}


def interrupted(config: TrainConfig, out: Path, epochs: int) -> None:
    """Leave `out` as a run that was killed after `epochs` epochs."""

    class Stop(Exception):
        pass

    def stop(row: dict) -> None:
        if row["epoch"] == epochs:
            raise Stop

    with pytest.raises(Stop):
        train(config, out, on_epoch=stop)


def test_record_has_the_schema_of_the_report(small: TrainConfig, out: Path):
    record = train(small, out)
    assert record == json.loads((out / "result.json").read_text())
    assert record["schema"] == 1
    assert record["config"] == small.as_dict()
    assert set(record["metrics"]) == {*SCORES, *MEASURED}
    assert [row["epoch"] for row in record["history"]] == [2, 4]
    where = {"gradguess", "commit", "clean", "torch", "python", "device", "threads", "platform"}
    assert set(record["environment"]) == where
    assert len((out / "metrics.jsonl").read_text().splitlines()) == small.epochs


def test_the_global_generator_is_left_alone(small: TrainConfig):
    before = torch.get_rng_state()
    first = train(small)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert scores(train(small)) == scores(first)
    assert scores(train(dataclasses.replace(small, seed=1))) != scores(first)


def test_a_run_by_finite_differences(small: TrainConfig):
    """In float64 it is that of dual numbers but for the last digits."""
    double = dataclasses.replace(small, dtype="float64")
    dual, finite = train(double), train(dataclasses.replace(double, derivative="finite"))
    assert "derivativefinite" in finite["key"]
    assert dual["metrics"]["train_loss"] != finite["metrics"]["train_loss"]
    assert math.isclose(dual["metrics"]["train_loss"], finite["metrics"]["train_loss"], rel_tol=1e-5)


def test_a_finished_run_is_not_run_again(small: TrainConfig, out: Path):
    first = train(small, out)
    assert train(small, out, on_epoch=lambda row: pytest.fail("ran again")) == first


def test_resumed_in_process_is_bit_equal(small: TrainConfig, out: Path, tmp_path: Path):
    undisturbed = train(small, tmp_path / "other")
    interrupted(small, out, epochs=3)
    assert scores(train(small, out)) == scores(undisturbed)
    ours, theirs = checkpoint.load(out), checkpoint.load(tmp_path / "other")
    assert ours is not None
    assert theirs is not None
    assert ours[0].keys() == theirs[0].keys()
    for name, value in ours[0].items():
        assert torch.equal(value, theirs[0][name]), name


@pytest.mark.slow
def test_killed_at_random_is_bit_equal(small: TrainConfig, out: Path):
    config = dataclasses.replace(small, epochs=60)
    command = [sys.executable, "-m", "gradguess", "train", "--out", str(out), "--json", "--threads", "1"]
    for name in ("method", "width", "depth", "epochs", "batch", "eval_every", "k", "refresh"):
        command += ["--" + name.replace("_", "-"), str(getattr(config, name))]
    log, moment = out / "metrics.jsonl", random.Random(0)
    for goal in (3, 25):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.read_bytes().count(b"\n") >= goal:
                break
            time.sleep(0.001)
        time.sleep(0.03 * moment.random())
        os.kill(process.pid, signal.SIGKILL)
        _, noise = process.communicate()
        assert process.returncode == -signal.SIGKILL, noise.decode()
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    resumed = json.loads(finished.stdout.splitlines()[-1])
    assert {name: resumed[name] for name in SCORES} == scores(train(config))
    assert resumed["epochs"] == 60
    epochs = [json.loads(line)["epoch"] for line in log.read_text().splitlines()]
    assert epochs == list(range(1, 61))


def test_another_configuration_is_refused(small: TrainConfig, out: Path):
    interrupted(small, out, epochs=1)
    before = sorted(out.iterdir())
    with pytest.raises(GradguessError, match=r"another configuration \(lr: 0.0001 there, 0.5 here\)"):
        train(dataclasses.replace(small, lr=0.5), out)
    assert sorted(out.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (checkpoint.FILE, lambda data: data[: len(data) // 2], "is damaged"),
        (checkpoint.FILE, lambda data: data.replace(b"peak_mb", b"peak_gb"), "is damaged"),
        ("config.json", lambda data: b"[]", "must hold a JSON object"),
    ],
)
def test_damage_is_noticed(small: TrainConfig, out: Path, name: str, damage, message: str):
    interrupted(small, out, epochs=2)
    path = out / name
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(GradguessError, match=message):
        train(small, out)


def test_a_full_disk_is_explained_and_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(GradguessError, match="disk is full"):
        write_atomic(path, "new")
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_half_written_files_are_not_seen(small: TrainConfig, out: Path):
    """What a kill in the middle of a checkpoint leaves: a file beside it, and half a line of the log."""
    interrupted(small, out, epochs=2)
    (out / f".{checkpoint.FILE}.99.tmp").write_bytes(b"half")
    with (out / "metrics.jsonl").open("a") as log:
        log.write('{"epoch": 3, "lo')
    assert scores(train(small, out)) == scores(train(small))


def test_diagnoses_do_not_change_the_run(small: TrainConfig):
    looked = train(dataclasses.replace(small, diagnose=2))
    assert scores(looked) == scores(train(small))
    assert [entry["epoch"] for entry in looked["diagnostics"]] == [2, 4]
    first, last = looked["diagnostics"]
    known = {"bias", "variance", "covariance_norm", "cosine", "rank", "gradient_norm"}
    assert set(first["sites"]["0"]) == known
    assert set(last["sites"]["0"]) == known | {"overlap"}
    json.dumps(looked)


LEARNED = 2.0  # a loss far below that of chance, ln 10 = 2.30


METHODS = ("backprop", "weight", "activation", "wt", "wperp-bottom", "wp", "feedback-direct")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str):
    config = TrainConfig(data="digits", method=method, width=16, depth=2, epochs=8, batch=50, lr=1e-2, k=4, refresh=20)
    assert train(config)["metrics"]["train_loss"] < LEARNED


def test_a_text_is_scored_in_bits_per_character(monkeypatch: pytest.MonkeyPatch):
    text = torch.randint(9, (40, 7))
    tiny = Dataset(text, text.roll(-1, 1), text[:8], text[:8].roll(-1, 1), 9, "text")
    monkeypatch.setattr(train_module, "load", lambda name: tiny)
    config = TrainConfig(model="charformer", data="shakespeare", width=8, depth=1, epochs=1, batch=20, method="wperp")
    metrics = train(config)["metrics"]
    assert metrics["test_bits"] == pytest.approx(metrics["test_loss"] / math.log(2))
    assert 0 < metrics["test_accuracy"] < 1


def test_a_held_out_part_takes_the_test_sets_place(small: TrainConfig):
    whole = load("mnist1d").first(200)
    part = whole.held_out(0.1)
    assert torch.equal(torch.cat([part.x_train, part.x_test]), whole.x_train)
    assert (len(part.x_train), len(part.y_test)) == (180, 20)
    assert whole.held_out(0.0) is whole
    record = train(dataclasses.replace(small, samples=200, holdout=0.1))
    assert record["metrics"]["test_accuracy"] * 20 == pytest.approx(round(record["metrics"]["test_accuracy"] * 20))


def test_a_row_holds_the_losses_of_the_first_steps(small: TrainConfig):
    config = dataclasses.replace(small, epochs=1)
    record = train(config)
    assert len(record["first"]) == 3
    assert first_losses(config) == record["first"]
    assert first_losses(dataclasses.replace(config, seed=1)) != record["first"]
