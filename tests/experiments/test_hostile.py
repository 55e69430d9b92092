"""Files made by hand, and machines that fail: one clear error, nothing executed, nothing written outside."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradguess as gg
from gradguess import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab.config import TrainConfig
from gradguess_lab.reproduce import reproduce
from gradguess_lab.train import train
from waiting import ended, until

CONFIG = TrainConfig(data="digits", method="wperp", width=8, depth=2, epochs=4, batch=512, k=3)


class Stop(Exception):
    pass


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was interrupted after two epochs."""

    def stop(row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise Stop

    with pytest.raises(Stop):
        train(CONFIG, tmp_path / "run", stop)
    return tmp_path / "run"


def forge(run: Path, data: bytes | None = None, **fields: Any) -> None:
    """A checkpoint of these bytes, or with these fields."""
    if data is None:
        tensors, state = checkpoint.load(run)  # type: ignore[misc]
        checkpoint.save(run, tensors, state | fields)
    else:
        (run / checkpoint.FILE).write_bytes(data)


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": -1},
        {"epoch": 10**30},
        {"epoch": "2"},
        {"peak_mb": float("nan")},
        {"peak_mb": "much"},
    ],
    ids=str,
)
def test_forged_fields_are_refused(run: Path, fields: dict[str, Any]):
    forge(run, **fields)
    with pytest.raises(GradguessError, match=r"fields are not those|is truncated"):
        train(CONFIG, run)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/gradguess-was-here",))


FORGED: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01",
    "pickle": pickle.dumps(Bomb()),
    "torch.save": b"PK\x03\x04" + bytes(100),
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "huge shape": header('{"model/0.weight":{"dtype":"F32","shape":[1000000000000,1000000000],"data_offsets":[0,4]}}'),
    "overflow": header('{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}') + bytes(8),
    "negative": header('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}') + bytes(4),
    "outside": header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}') + bytes(4),
    "no json": header("}{"),
    "nested": header("[" * 100_000),
    "no tensors": header("{}"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors_are_refused(run: Path, name: str):
    forge(run, FORGED[name])
    with pytest.raises(GradguessError, match="is damaged"):
        train(CONFIG, run)
    assert not Path("/tmp/gradguess-was-here").exists()


def _weight(tensors: dict[str, torch.Tensor]) -> str:
    return min(key for key in tensors if key.startswith("model/"))


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "other shape": lambda t: t.update({_weight(t): torch.zeros(3, 3)}),
    "missing weight": lambda t: t.pop(_weight(t)),
    "stranger": lambda t: t.update({"model/extra": torch.zeros(1)}),
    "unknown part": lambda t: t.update({"os/system": torch.zeros(1)}),
    "no slash": lambda t: t.update({"weights": torch.zeros(1)}),
    "odd slot": lambda t: t.update({"optimiser/x/step": torch.zeros(1)}),
    "generator": lambda t: t.update({"forward/generator": torch.zeros(3, dtype=torch.uint8)}),
    "shuffle": lambda t: t.update({"generator/shuffle": torch.zeros(3)}),
    "no generator": lambda t: t.pop("forward/generator"),
    "cache": lambda t: t.update({"forward/nonsense/0/basis": torch.zeros(2, 2)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit_are_refused(run: Path, name: str):
    tensors, state = checkpoint.load(run)  # type: ignore[misc]
    CHANGES[name](tensors)
    checkpoint.save(run, tensors, state)
    with pytest.raises(GradguessError, match="does not fit this run"):
        train(CONFIG, run)


@pytest.mark.parametrize("row", ["{}", "[1]", "NaN", '{"epoch": 1, "loss": "low"}', "[" * 10_000, '{"epoch": 7}'])
def test_forged_metrics_are_refused(run: Path, row: str):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([row, *lines[1:]]) + "\n")
    with pytest.raises(GradguessError, match=r"line 1 is not a row"):
        train(CONFIG, run)


@pytest.mark.parametrize("text", ["{}", "[]", "[" * 100_000, '{"key": "x", "metrics": {}}', "\x00", '{"metrics": 3}'])
def test_forged_results_are_refused(run: Path, text: str):
    (run / "result.json").write_text(text)
    with pytest.raises(GradguessError):
        train(CONFIG, run)


def test_every_truncation_is_noticed(run: Path):
    files = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".jsonl", ".safetensors")}
    for path, data in files.items():
        whole = len(data.rstrip()) if path.suffix == ".json" else len(data)  # the newline after an object says nothing
        for length in range(0, whole, max(1, whole // 12)):
            path.write_bytes(data[:length])
            with pytest.raises(GradguessError):
                train(CONFIG, run)
        path.write_bytes(data)
    train(CONFIG, run)


def test_half_written_files_are_not_seen(run: Path):
    """What a kill in the middle of a checkpoint leaves beside it."""
    (run / f".{checkpoint.FILE}.99.tmp").write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"epoch": 3, "lo')
    found = train(CONFIG, run)
    assert found["metrics"]["train_loss"] == train(CONFIG)["metrics"]["train_loss"]


# --- the machine ---------------------------------------------------------------------------------------------

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("mounting is not allowed here")
    yield disk
    libc.umount2(str(disk).encode(), 2)


@root
def test_a_full_disk_is_explained_and_the_run_goes_on_when_there_is_room(small_disk: Path):
    out = small_disk / "run"
    with pytest.raises(Stop):
        train(CONFIG, out, lambda row: _stop(row, 1))
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(10**6))
    with pytest.raises(GradguessError, match="disk is full"):
        train(CONFIG, out)
    filler.unlink()
    assert train(CONFIG, out)["metrics"]["train_loss"] == train(CONFIG)["metrics"]["train_loss"]


def _stop(row: dict[str, Any], epoch: int) -> None:
    if row["epoch"] == epoch:
        raise Stop


def test_a_directory_that_cannot_be_written(tmp_path: Path):
    target = Path("/proc/self/nothing") if os.geteuid() == 0 else tmp_path / "locked" / "run"
    if os.geteuid() != 0:
        target.parent.mkdir(mode=0o500)
    with pytest.raises(GradguessError, match=str(target.parent)):
        train(CONFIG, target)


def _command(out: Path, **changes: Any) -> list[str]:
    config = dataclasses.replace(CONFIG, **changes)
    options = ("data", "method", "width", "depth", "epochs", "batch", "k")
    named = [part for name in options for part in (f"--{name}", str(getattr(config, name)))]
    return [sys.executable, "-m", "gradguess", "train", *named, "--out", str(out), "--threads", "1"]


@pytest.mark.usefixtures("heard")
def test_ctrl_c_twice(tmp_path: Path):
    out = tmp_path / "run"
    process = subprocess.Popen(_command(out, epochs=5000), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until((out / checkpoint.FILE).exists)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    err = ended(process)
    assert process.returncode in (130, -signal.SIGINT), err
    stored = checkpoint.load(out)
    assert stored is not None
    again = subprocess.Popen(_command(out, epochs=5000), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until(lambda: checkpoint.load(out)[1]["epoch"] > stored[1]["epoch"])  # type: ignore[index]
    again.send_signal(signal.SIGINT)
    err = ended(again)
    assert again.returncode == 130
    assert "the same command continues" in " ".join(err.split())
    assert "Traceback" not in err


def test_a_checkpoint_is_read_while_the_run_goes_on(tmp_path: Path):
    """`gradguess diagnose` on a run that is not over."""
    checkpoint.save(tmp_path, {"epoch": torch.tensor(1)}, {"epoch": 1, "peak_mb": 0.0})
    over = threading.Event()

    def write() -> None:
        for epoch in range(2, 1000):
            if over.is_set():
                return
            checkpoint.save(tmp_path, {"epoch": torch.tensor(epoch)}, {"epoch": epoch, "peak_mb": 0.0})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while writer.is_alive():
            stored = checkpoint.load(tmp_path)
            assert stored is not None
            assert stored[0]["epoch"].item() == stored[1]["epoch"]
    finally:
        over.set()
        writer.join()


def test_two_processes_on_one_directory(tmp_path: Path):
    out = tmp_path / "run"
    first = subprocess.Popen(_command(out, epochs=5000), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until((out / checkpoint.FILE).exists)
        with pytest.raises(GradguessError, match="in use by another process"):
            train(dataclasses.replace(CONFIG, epochs=5000), out)
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


# --- data and names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "method",
    [gg.WeightPerturbation(), gg.ActivationPerturbation(), gg.WPerp(k=3), gg.Feedback(gg.WPerp(k=3)), gg.Backprop()],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize("memory", ["store", "replay"])
def test_bad_numbers_in_the_data_are_told(method: Any, bad: float, memory: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    before = [p.clone() for p in model.parameters()]
    x, t = torch.randn(6, 4), torch.randint(3, (6,))
    x[2, 1] = bad
    forward = gg.ForwardGradient(model, method, memory=memory)
    with pytest.raises(gg.NonFiniteError, match=r"at step 0 is NaN or infinite"):
        forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    forward(torch.nn.CrossEntropyLoss(reduction="none"), x[:2], t[:2])
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_names_of_runs_stay_inside_the_directory(tmp_path: Path):
    config = dataclasses.replace(CONFIG, epochs=1, device="cpu")
    assert "/" not in dataclasses.replace(config).key
    reproduce({"../../outside": [config]}, tmp_path / "out", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
