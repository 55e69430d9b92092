"""Ctrl-C: never lost, nothing that was finished is, and no process stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradguess_lab import checkpoint, interrupts
from waiting import until

pytestmark = pytest.mark.usefixtures("heard")


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def loop(seen: list[str], end: Callable[[], None]) -> None:
    with interrupts.asked_between_steps():
        press()
        seen.append("waited")
        end()
        seen.append("the end")
    seen.append("went on")


@pytest.mark.parametrize("end", [interrupts.check, press], ids=["check", "a second press"])
def test_the_first_waits_for_the_loop_and_the_second_does_not(end: Callable[[], None]):
    seen: list[str] = []
    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        loop(seen, end)
    assert seen == ["waited"]
    interrupts.check()  # all is as before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_the_processes_of_reproduce_end_together(tmp_path: Path):
    """As a terminal does it: every process of the group hears Ctrl-C."""
    configs = [{"data": "digits", "width": 8, "depth": 1, "epochs": 5000, "seed": seed} for seed in range(3)]
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    options = ["--configs", str(tmp_path / "configs.json"), "--out", str(tmp_path), "--jobs", "2"]
    command = [sys.executable, "-m", "gradguess", "reproduce", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: len(list(tmp_path.glob(f"runs/*/{checkpoint.FILE}"))) == 2)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert "the same command continues" in " ".join(err.split())
        assert "Traceback" not in err
        assert all(checkpoint.load(path.parent) for path in tmp_path.glob(f"runs/*/{checkpoint.FILE}"))
        until(lambda: not any(_lives(int(p.name)) and _group(p) == process.pid for p in _processes()))
    finally:
        if any(_group(p) == process.pid for p in _processes()):
            os.killpg(process.pid, signal.SIGKILL)


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _fields(process: Path) -> list[str]:
    """State, parent, process group…; empty for one that is gone."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _group(process: Path) -> int:
    return int((_fields(process) or [0, 0, 0])[2])


def _lives(pid: int) -> bool:
    return (_fields(Path("/proc") / str(pid)) or ["Z"])[0] != "Z"
