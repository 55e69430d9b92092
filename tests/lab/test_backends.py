"""Many runs on processes, Ray and Dask, a worker killed in the middle: no run lost, none run twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradguess import GradguessError
from gradguess_lab.config import TrainConfig
from gradguess_lab.reproduce import reproduce
from gradguess_lab.run_many import run_directory

pytestmark = pytest.mark.slow
CONFIGS = [TrainConfig(method="weight", width=8, depth=1, epochs=40, seed=seed, data="digits") for seed in range(4)]


def _holder(out: Path) -> int | None:
    """The process that runs one of the runs: it holds the lock of the run's directory."""
    mine = {str((run_directory(out, config) / ".lock").resolve()) for config in CONFIGS}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if any(str(link.readlink()) in mine for link in (process / "fd").iterdir()):
                    return int(process.name)
            except OSError:
                continue
    return None


def _kill_one(out: Path, killed: list[int]) -> None:
    """Once some epochs are logged, kill -9 a worker."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        started = [d for d in (out / "runs").glob("*/metrics.jsonl") if d.stat().st_size > 300]
        pid = _holder(out) if started else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            return
        time.sleep(0.02)


def survive(out: Path, **options: object) -> None:
    killed: list[int] = []
    killer = threading.Thread(target=_kill_one, args=(out, killed))
    killer.start()
    records, failures = reproduce({"all": CONFIGS}, out, 2, **options)  # type: ignore[arg-type]
    killer.join()
    assert killed
    assert failures == {}
    assert sorted(record["key"] for record in records) == sorted(config.key for config in CONFIGS)
    for config in CONFIGS:
        lines = (run_directory(out, config) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == list(range(1, 41))
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    reproduce({"all": CONFIGS}, out, 2)
    assert stamps == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}  # nothing is run again


def test_processes(tmp_path):
    survive(tmp_path)


@pytest.fixture
def dask_address() -> Iterator[str]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def test_dask(tmp_path, dask_address):
    survive(tmp_path, backend="dask", address=dask_address)


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_ray(tmp_path, ray_cluster):
    survive(tmp_path, backend="ray")


def _refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(GradguessError, match=match):
        call()


def test_bad_backends_are_refused(tmp_path):
    runs = {"all": CONFIGS}
    _refused(lambda: reproduce(runs, tmp_path, 1, backend="slurm"), "--backend must be one of")  # type: ignore[arg-type]
    _refused(lambda: reproduce(runs, tmp_path, 1, address="tcp://x:1"), "--address needs")
