"""Processes that get ready side by side time kernels one at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from gradguess_lab.bench.choosing import LOCK, one_at_a_time


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Whether another process could have taken the lock, each time that kernels are timed."""
    file, found = tmp_path / "lock", list[bool]()
    file.touch()

    def timed(self: object, *args: object) -> str:
        with file.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(False)
            else:
                found.append(True)
        return f"the fastest for {args}"

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", timed)
    monkeypatch.setenv(LOCK, str(file))
    return found


def test_kernels_are_timed_under_the_lock(tried: list[bool]):
    with one_at_a_time():
        assert CachingAutotuner.benchmark_all_configs(None, 3) == "the fastest for (3,)"
    CachingAutotuner.benchmark_all_configs(None, 3)
    assert tried == [False, True]


def test_without_a_lock_nothing_changes(tried: list[bool], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(LOCK)
    with one_at_a_time():
        CachingAutotuner.benchmark_all_configs(None, 3)
    assert tried == [True]
