"""Jobs, plans and the one way to run them.

A job is one run that knows which experiment it belongs to; it becomes one row of a study. A plan is a generator: it
yields the jobs that can be run now, gets their rows, and yields what these rows ask for, such as the seeds at the rate
that did best. Jobs run in processes of this machine by joblib, or on a cluster of Ray or Dask.

Every run lives in a directory of its own and continues there from its last epoch. So a worker that dies costs the epoch
that it was in: what is not finished is handed out again, and what is finished is never run twice. The workers of a
cluster must see the directory under the same path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from gradguess.errors import GradguessError, NonFiniteError, require
from gradguess_lab import interrupts, store
from gradguess_lab.config import TrainConfig, misfit
from gradguess_lab.files import exclusive, write_atomic, write_json
from gradguess_lab.streams.config import StreamConfig

Backend = Literal["processes", "ray", "dask"]
Row = dict[str, Any]
Settings = dict[str, Any]  # fields of a configuration
Rows = Mapping[str, Row | None]  # by key; None: the run failed
Look = Callable[[], tuple[float, str]]  # `look` at the runs of a stage
EXTRA = "gradguess-lab[dist]"
ATTEMPTS = 10  # after so many deaths of workers we no longer believe in bad luck


@dataclass(frozen=True)
class Job:
    """One run and whose it is: a variant on a task in an experiment, which chooses a rate or is reported."""

    experiment: str
    task: str
    variant: str
    settings: Any  # a TrainConfig or a StreamConfig
    role: Literal["tuning", "reported"] = "reported"

    @property
    def key(self) -> str:
        """A configuration always has the same key, so that it is never run twice."""
        return self.settings.key

    def at(self, role: Literal["tuning", "reported"] = "reported", **changes: Any) -> Job:
        """The same with other settings."""
        return dataclasses.replace(self, role=role, settings=dataclasses.replace(self.settings, **changes))

    def directory(self, out: Path) -> Path:
        """Where the run lives."""
        return out / "runs" / self.key

    def row(self, out: Path) -> Row | None:
        """Its row, from its directory or as it is stored; None if there is none, or one that is torn or another's."""
        try:
            row = store.find(out, self.key)
        except GradguessError:
            return None
        return row if row is not None and not misfit(row, self.settings) else None


def spread(*kinds: Mapping[str, Any], **axes: Any) -> list[Settings]:
    """Every kind at every combination of the axes. A tuple is an axis, also in a kind; the first varies slowest.

    >>> spread({"k": (1, 2)}, {"k": 3}, width=(8, 16))[2:5]
    [{'width': 8, 'k': 3}, {'width': 16, 'k': 1}, {'width': 16, 'k': 2}]
    """

    def combinations(part: Mapping[str, Any]) -> list[Settings]:
        values = (value if isinstance(value, tuple) else (value,) for value in part.values())
        return [dict(zip(part, one, strict=True)) for one in itertools.product(*values)]

    return [at | one for at in combinations(axes) for kind in kinds or ({},) for one in combinations(kind)]


Plan = Generator[list[Job], Rows, None]


def at_once(jobs: Iterable[Job]) -> Plan:
    """A plan with nothing to choose."""
    yield list(jobs)


def tuned(
    job: Job,
    rates: Sequence[float],
    tuning: Sequence[Mapping[str, Any]],
    reported: Sequence[Mapping[str, Any]],
    loss: Callable[[Row], float],
) -> Plan:
    """First the runs that choose the learning rate, then those that are reported.

    Args:
        tuning: what each tuning run of a rate changes, such as its seed. The rate whose worst run has the least loss
            is taken. A rate of which one run is worse than all runs of another cannot win: the rest is not made.
        reported: what each reported run changes.
        loss: of a row, the smaller the better. One that is not finite counts as infinite.
    """
    left = {rate: [job.at("tuning", lr=rate, **changes) for changes in tuning] for rate in rates if len(rates) > 1}
    worst, any_ended = dict.fromkeys(rates, -math.inf), not left
    batch = [(rate, left[rate].pop(0)) for rate in left]
    while batch:
        rows = yield [one for _, one in batch]
        for rate, one in batch:
            row = rows[one.key]
            any_ended |= row is not None
            value = math.inf if row is None else loss(row)
            worst[rate] = max(worst[rate], value if math.isfinite(value) else math.inf)
        least = min((worst[rate] for rate in left if not left[rate]), default=math.inf)
        better = [rate for rate in left if left[rate] and worst[rate] < least]
        batch = [(rate, left[rate].pop(0)) for rate in sorted(better, key=worst.__getitem__)[:1]]
    if any_ended:
        best = min((r for r in rates if not left.get(r)), key=lambda r: (worst[r], r), default=rates[0])
        yield [job.at(lr=best, **changes) for changes in reported]


def run_plans(
    plans: Iterable[Plan],
    out: Path,
    workers: int = 1,
    on_progress: Callable[[Look], None] | None = None,
    backend: Backend = "processes",
    address: str | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """The rows of all jobs of all plans, finished before or now, and the message of each run that failed, by key.

    Interrupted, this loses at most the epoch that each process is in. `on_progress` gets what it may ask how far the
    runs are, once for each stage. Beside the directories of the runs, `results.jsonl` holds all rows with the
    experiments that they belong to; those of other calls stay.
    """
    kept = store.keep(out, [])  # before all the work: it may be damaged, or the disk full
    out = out.resolve()
    rows: dict[str, Row] = {}
    pending = [(plan, next(plan, [])) for plan in plans]
    while pending:
        batch = [job for _, jobs in pending for job in jobs]
        rows |= {job.key: row for job in batch if job.key not in rows and (row := job.row(out)) is not None}
        left = {job.key: job for job in batch if job.key not in rows}
        if left:
            jobs = sorted(left.values(), key=cost, reverse=True)
            if on_progress:
                on_progress(partial(look, out, jobs))
            whys = _run_all(jobs, out, workers, backend, address)
            rows |= {job.key: job.row(out) or _failed(job, whys.get(job.key, "")) for job in jobs}
        for job in batch:
            kept[job.key] = rows[job.key] = _identified(rows[job.key], job, kept.get(job.key, {}))
        kept = store.keep(out, kept.values())
        results = {job.key: rows[job.key] if ended(rows[job.key]) else None for job in batch}
        pending = [(plan, jobs) for plan, _ in pending if (jobs := _sent(plan, results))]
    found = [row for row in rows.values() if ended(row)]
    return found, {key: row["failed"] for key, row in rows.items() if not ended(row)}


def ended(row: Row) -> bool:
    """Whether it is that of a run that came to its end, be it on a stream; not one that says why there is no result."""
    return bool(row.get("metrics", True))


def _failed(job: Job, why: str) -> Row:
    return {"schema": 1, "key": job.key, "config": job.settings.as_dict(), "metrics": {}, "failed": why}


def _sent(plan: Plan, rows: Rows) -> list[Job]:
    """The next jobs of a plan, none at its end."""
    try:
        return plan.send(rows)
    except StopIteration:
        return []


def _identified(row: Row, job: Job, earlier: Row) -> Row:
    """The row with what it is, with the experiments that asked for it before, and with what was measured since."""
    experiments = [*earlier.get("experiments", ()), *row.get("experiments", ()), job.experiment]
    identity = {"task": job.task, "variant": job.variant, "role": job.role}
    found = {"key": job.key, "experiments": list(dict.fromkeys(experiments)), **identity, "schema": 1}
    found |= {name: value for name, value in row.items() if name not in found}
    if "metrics" in row:
        found["metrics"] = earlier.get("metrics", {}) | row["metrics"]
    return found


def factor(config: TrainConfig) -> float:
    """How many times as long as others a step takes, roughly."""
    if config.method in ("wperp", "wperp-bottom"):
        return 1.0 if config.solver == "shared" else 130.0
    return {"wperp-ns": 300.0, "wp": 4.0}.get(config.method, 1.0)


def is_heavy(config: TrainConfig) -> bool:
    """Whether the run decomposes a matrix of full size for every sample and step."""
    return factor(config) > 100


def cost(job: Job) -> float:
    """Roughly how much work a run is. Expensive ones come first, so that no process is left alone with the longest."""
    config = job.settings
    if isinstance(config, StreamConfig):
        return config.steps * config.streams * config.width**2.0
    return config.epochs * (config.depth * config.width**2 + 6e4) * factor(config)


def look(out: Path, jobs: Sequence[Job]) -> tuple[float, str]:
    """The part of the work that is done, and in words how many runs are, and which run now.

    It is read from the logs of the runs: processes need not report, and a resumed run counts at once.
    """
    finished, done, running = 0, 0.0, []
    for job in jobs:
        place, total = job.directory(out), getattr(job.settings, "epochs", 1)
        if (place / "result.json").exists() or (place / "failed.json").exists():
            finished, done = finished + 1, done + cost(job)
            continue
        with contextlib.suppress(OSError):
            log = place / "metrics.jsonl"
            epochs = min(total, log.read_bytes().count(b"\n"))
            done += cost(job) * epochs / total
            if time.time() - log.stat().st_mtime < 60:
                running.append(f"{job.key} {epochs}/{total}")
    return done / sum(map(cost, jobs)), f"{finished}/{len(jobs)} runs  {', '.join(running)}"


def _run_all(jobs: list[Job], out: Path, workers: int, backend: Backend, address: str | None) -> dict[str, str]:
    """Run what `out` does not hold yet, so many at a time; the message of each run that failed, by key."""
    import joblib

    name = "loky" if backend == "processes" else backend
    # Ray's pool returns everything at the end; the results are in the directories long before
    order = "list" if backend == "ray" else "generator_unordered"
    failures: dict[str, str] = {}
    with _cluster(backend, address), joblib.parallel_config(backend=name, n_jobs=max(1, workers)):
        for attempt in range(1, ATTEMPTS + 1):
            left = [job for job in jobs if job.key not in failures and job.row(out) is None]
            pool = joblib.Parallel(batch_size=1, pre_dispatch="all", return_as=order)
            try:
                failures.update(end for end in pool(joblib.delayed(work)(job, out) for job in left) if end[1])
                break
            except Exception:  # a worker died: what a run raises is among the failures
                if attempt == ATTEMPTS:
                    raise
                time.sleep(1)  # until the kernel has freed the locks of the dead
    return failures


def work(job: Job, out: Path) -> tuple[str, str]:
    """Run a job in this worker; its key, and why it failed, which is empty if it did not.

    A worker has one thread: at these sizes several threads wait for each other. An error ends this run and no other.
    One that nobody foresaw leaves its traceback in the run's directory. A run that diverged is not made again.
    """
    import torch

    from gradguess_lab import train
    from gradguess_lab.streams.run import run as run_stream

    torch.set_num_threads(1)
    directory, config = job.directory(out), job.settings
    try:
        with interrupts.listening():  # a terminal sends Ctrl-C to every process, and it must end each of them
            if isinstance(config, TrainConfig):
                train.train(config, directory)
            else:
                with exclusive(directory):
                    write_json(directory / "result.json", run_stream(config))
    except NonFiniteError as error:
        write_json(directory / "failed.json", _failed(job, str(error)))
    except GradguessError as error:
        return job.key, str(error)
    except Exception as error:
        with contextlib.suppress(GradguessError):  # a full disk must not hide the error itself
            write_atomic(directory / "error.txt", traceback.format_exc())
        return job.key, f"{type(error).__name__}: {error} (see {directory / 'error.txt'})"
    return job.key, ""


@contextlib.contextmanager
def _cluster(backend: Backend, address: str | None) -> Iterator[None]:
    """Join the cluster of `backend` at `address`, or start one here; processes need none."""
    if backend not in get_args(Backend):
        raise GradguessError(f"--backend must be one of {', '.join(get_args(Backend))}, found {backend!r}.")
    if backend == "processes" and address is not None:
        raise GradguessError(f"--address needs --backend ray or dask, found {address!r} with processes.")
    with contextlib.ExitStack() as held:
        try:
            if backend == "ray":
                ray, pool = (require(name, EXTRA, "the backend ray") for name in ("ray", "ray.util.joblib"))
                if not ray.is_initialized():
                    ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
                    held.callback(ray.shutdown)
                pool.register_ray()
            elif backend == "dask":
                client = require("distributed", EXTRA, "the backend dask").Client
                held.enter_context(client(address, timeout=20) if address else client(threads_per_worker=1))
        except (OSError, ValueError, RuntimeError) as error:
            where = address or "this machine"
            raise GradguessError(f"no {backend} cluster answers at {where}: {error}. Check --address.") from error
        yield
