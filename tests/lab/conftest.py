"""Small, quick runs, with data that is made once per session and a cache that is not the user's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradguess_lab.config import TrainConfig


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bit-equality is promised at an equal number of threads, also in the processes that tests start."""
    before = torch.get_num_threads()
    changed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # beside the directories of all xdist workers, so that the data is generated once
    changed["GRADGUESS_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "gradguess-cache")
    saved = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value


@pytest.fixture
def small() -> TrainConfig:
    return TrainConfig(method="wperp", width=16, depth=2, epochs=4, batch=1000, eval_every=2, k=4, refresh=3)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C reaches this process and those that it starts, also where a shell in the background had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
