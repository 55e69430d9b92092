"""Plans and the runner: what is chosen, what a kill costs on processes, Ray and Dask, and what is never run twice."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradguess.errors import GradguessError
from gradguess_lab import jobs, store
from gradguess_lab.config import TrainConfig
from gradguess_lab.jobs import Job, at_once, look, run_plans, tuned
from gradguess_lab.streams.config import StreamConfig

pytest.importorskip("mnist1d")
WT = TrainConfig(method="wt", width=8, depth=1, epochs=2, batch=2000)
JOB = Job("mine", "mlp-mnist1d", "wt", WT)
STREAM = StreamConfig(delay=2, k=3, width=6, streams=3, steps=12)


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(8))
def test_the_rate_is_the_one_whose_worse_run_is_best(number: int):
    """And runs that cannot change it are not made."""
    source, rates, seeds = random.Random(number), (1e-3, 1e-2, 1e-1), [{"seed": 100}, {"seed": 101}]
    losses = {
        JOB.at(lr=rate, **seed).key: source.choice([math.nan, *(source.random() for _ in range(5))])
        for rate in rates
        for seed in seeds
    }
    plan = tuned(JOB, rates, seeds, [{"seed": 0}, {"seed": 1}], lambda row: row["loss"])
    made, batch = list[Job](), next(plan)
    while batch[0].role == "tuning":
        assert not set(batch) & set(made)
        made += batch
        batch = plan.send({job.key: {"loss": losses[job.key]} for job in batch})
    size = {key: loss if math.isfinite(loss) else math.inf for key, loss in losses.items()}
    worst = {rate: max(size[JOB.at(lr=rate, **seed).key] for seed in seeds) for rate in rates}
    (chosen,) = {job.settings.lr for job in batch}
    assert [job.settings.seed for job in batch] == [0, 1]
    assert worst[chosen] == min(worst.values())
    tried = {job.key for job in made}
    for rate in rates:
        own = [JOB.at(lr=rate, **seed).key for seed in seeds]
        assert max(size[key] for key in own if key in tried) >= worst[chosen] or set(own) <= tried


def test_a_rate_whose_run_failed_is_not_chosen_and_without_rates_nothing_is():
    plan = tuned(JOB, (1e-3, 1e-2), [{"seed": 100}], [{"seed": 0}], lambda row: row["loss"])
    first, second = next(plan)
    assert [job.settings.lr for job in plan.send({first.key: None, second.key: {"loss": 9.0}})] == [1e-2]
    plan = tuned(JOB, (1e-3, 1e-2), [{"seed": 100}], [{"seed": 0}], lambda row: row["loss"])
    with pytest.raises(StopIteration):
        plan.send(dict.fromkeys(job.key for job in next(plan)))
    (only,) = next(tuned(JOB, (0.5,), [{"seed": 100}], [{"seed": 3}], lambda row: 0.0))
    assert (only.role, only.settings.lr, only.settings.seed) == ("reported", 0.5, 3)


# --- running ---------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_run_and_failures_are_named(tmp_path: Path):
    bad, other = JOB.at(device="nonsense"), dataclasses.replace(JOB, experiment="another")
    rows, failures = run_plans([at_once([JOB, JOB, bad]), at_once([other])], tmp_path)
    assert [row["key"] for row in rows] == [JOB.key]
    assert list(failures) == [bad.key]
    assert rows[0]["experiments"] == ["mine", "another"]
    assert [rows[0][name] for name in ("task", "variant", "role")] == ["mlp-mnist1d", "wt", "reported"]
    assert "nonsense" in store.rows(tmp_path)[bad.key]["failed"]
    path = JOB.directory(tmp_path) / "result.json"
    stamp = path.stat().st_mtime_ns
    again, _ = run_plans([at_once([JOB])], tmp_path)
    assert again == rows
    assert path.stat().st_mtime_ns == stamp
    done, words = look(tmp_path, [JOB])
    assert (done, words.strip()) == (1.0, "1/1 runs")


def test_a_run_on_a_stream_is_a_run_like_any_other(tmp_path: Path):
    job = Job("recall12", "recall", "wperp", STREAM)
    (row,), failures = run_plans([at_once([job, dataclasses.replace(job, settings=STREAM)])], tmp_path)
    assert failures == {}
    assert {"error", "step_ms", "memory_mb", "curve"} <= row.keys()
    assert store.rows(tmp_path) == {job.key: row}
    assert list(store.runs(tmp_path)) == []  # tables of runs on batches do not see it


def test_a_run_that_diverges_is_said_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = JOB.at(method="backprop", lr=1e30)
    rows, failures = run_plans([at_once([job])], tmp_path)
    assert rows == []
    assert "NaN or infinite" in failures[job.key]
    monkeypatch.setattr(jobs, "_run_all", lambda *arguments: pytest.fail("tried again"))
    assert run_plans([at_once([job])], tmp_path) == (rows, failures)


@pytest.mark.parametrize("content", ["", "[]", {"config": {"lr": 0.5}}, {"key": "x"}, {"metrics": {}}])
def test_a_result_that_is_torn_or_of_another_configuration_is_not_finished(tmp_path: Path, content: Any):
    whole = {"schema": 1, "key": JOB.key, "config": WT.as_dict(), "metrics": {"epochs": 2}, "history": []}
    path = JOB.directory(tmp_path) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(whole))
    assert JOB.row(tmp_path) == whole
    path.write_text(content if isinstance(content, str) else json.dumps(whole | content))
    assert JOB.row(tmp_path) is None
    rows, failures = run_plans([at_once([JOB])], tmp_path)
    assert rows == []
    assert list(failures) == [JOB.key]  # and it is not written over


def test_rows_of_other_calls_stay(tmp_path: Path):
    """Also where the directories of their runs are gone, and where they are stored, as in this repository."""
    one, two = JOB.at(epochs=1), JOB.at(epochs=1, seed=1)
    (first,), _ = run_plans([at_once([one])], tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "runs")
    (second,), _ = run_plans([at_once([two])], tmp_path / "s")
    assert store.rows(tmp_path / "s") == {one.key: first, two.key: second}
    store.main(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    assert run_plans([at_once([one])], tmp_path / "s")[0] == [first]
    (tmp_path / "s" / "results.jsonl").write_text("{")
    with pytest.raises(GradguessError, match=r"results.jsonl, line 1 is truncated or not JSON"):
        run_plans([at_once([two])], tmp_path / "s")


# --- a worker killed in the middle: no run lost, none run twice ------------------------------------------------------

LONG = [JOB.at(method="weight", width=8, depth=1, epochs=40, seed=seed, data="digits", batch=512) for seed in range(4)]


def _holder(out: Path) -> int | None:
    """The process that runs one of the runs: it holds the lock of the run's directory."""
    mine = {str((job.directory(out) / ".lock").resolve()) for job in LONG}
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


def survive(out: Path, **options: Any) -> None:
    killed: list[int] = []
    killer = threading.Thread(target=_kill_one, args=(out, killed))
    killer.start()
    rows, failures = run_plans([at_once(LONG)], out, 2, **options)
    killer.join()
    assert killed
    assert failures == {}
    assert sorted(row["key"] for row in rows) == sorted(job.key for job in LONG)
    for job in LONG:
        lines = (job.directory(out) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == list(range(1, 41))
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    run_plans([at_once(LONG)], out, 2)
    assert stamps == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}  # nothing is run again


@pytest.mark.slow
def test_processes_survive(tmp_path: Path):
    survive(tmp_path)


@pytest.fixture
def dask_address() -> Iterator[str]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.mark.slow
def test_dask_survives(tmp_path: Path, dask_address: str):
    survive(tmp_path, backend="dask", address=dask_address)


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_survives(tmp_path: Path, ray_cluster: None):
    survive(tmp_path, backend="ray")
