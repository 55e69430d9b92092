"""Many runs: in processes of this machine by joblib, or on a cluster of Ray or Dask.

Every run lives in a directory of its own and continues there from its last epoch (`train`). So a worker that dies costs
the epoch that it was in: what is not finished is handed out again, and what is finished is never run twice. The workers
of a cluster must see the directory under the same path.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from gradguess.errors import GradguessError
from gradguess.extras import require
from gradguess_lab import interrupts
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import write_atomic
from gradguess_lab.stored import has_result

Backend = Literal["processes", "ray", "dask"]
ATTEMPTS = 10  # after so many deaths of workers we no longer believe in bad luck
DEATHS = {  # the names of what the backends raise when a worker was killed; none of them need be installed
    "TerminatedWorkerError",
    "BrokenProcessPool",
    "KilledWorker",
    "CancelledError",
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "ObjectLostError",
}
Failure = tuple[str, str]  # the key of a run, and why it failed; no reason if it did not


def run_directory(out: Path, config: TrainConfig) -> Path:
    """Where a run lives. A configuration always has the same place, so that it is never run twice."""
    return out / "runs" / config.key


def is_finished(out: Path, config: TrainConfig) -> bool:
    """Whether its result is there: whole, and of this configuration."""
    return has_result(run_directory(out, config), config)


def run_many(
    configs: Iterable[TrainConfig],
    out: Path,
    jobs: int,
    backend: Backend = "processes",
    address: str | None = None,
) -> dict[str, str]:
    """Run what `out` does not hold yet, `jobs` runs at a time; the message of each run that failed, by key."""
    configs, out, failures = list(configs), out.resolve(), dict[str, str]()
    with _cluster(backend, address):
        for attempt in range(1, ATTEMPTS + 1):
            left = [c for c in configs if c.key not in failures and not is_finished(out, c)]
            try:
                for key, message in _hand_out([(c, run_directory(out, c)) for c in left], jobs, backend):
                    if message:
                        failures[key] = message
                break
            except Exception as error:
                if not _is_death(error) or attempt == ATTEMPTS:
                    raise
                time.sleep(1)  # until the kernel has freed the locks of the dead
    return failures


def _run_one(config: TrainConfig, directory: Path) -> Failure:
    """Run `config` in this worker.

    It has one thread: at these sizes several threads wait for each other. An error ends this run and no other. One that
    nobody foresaw leaves its traceback in the run's directory.
    """
    import torch

    from gradguess_lab.train import train

    torch.set_num_threads(1)
    try:
        with interrupts.listening():  # a terminal sends Ctrl-C to every process, and it must end each of them
            train(config, directory)
    except GradguessError as error:
        return config.key, str(error)
    except Exception as error:
        with contextlib.suppress(GradguessError):  # a full disk must not hide the error itself
            write_atomic(directory / "error.txt", traceback.format_exc())
        return config.key, f"{type(error).__name__}: {error} (see {directory / 'error.txt'})"
    return config.key, ""


def _hand_out(runs: Sequence[tuple[TrainConfig, Path]], jobs: int, backend: Backend) -> Iterator[Failure]:
    """Give each run to the first worker that is free."""
    import joblib

    if not runs:
        return
    name = "loky" if backend == "processes" else backend
    with joblib.parallel_config(backend=name, n_jobs=max(1, jobs)):
        # Ray's pool returns everything at the end; the results are in the directories long before.
        pool = joblib.Parallel(
            batch_size=1, pre_dispatch="all", return_as="list" if backend == "ray" else "generator_unordered"
        )
        yield from pool(joblib.delayed(_run_one)(config, directory) for config, directory in runs)


def _is_death(error: BaseException | None) -> bool:
    while error is not None:
        if DEATHS & {kind.__name__ for kind in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _cluster(backend: Backend, address: str | None) -> Iterator[None]:
    """Join the cluster of `backend` at `address`, or start one here; processes need none."""
    if backend not in get_args(Backend):
        raise GradguessError(f"--backend must be one of {', '.join(get_args(Backend))}, found {backend!r}.")
    if backend == "processes":
        if address is not None:
            raise GradguessError(f"--address needs --backend ray or dask, found {address!r} with processes.")
        yield
        return
    with _ray(address) if backend == "ray" else _dask(address):
        yield


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    ray = require("ray", "gradguess-lab[dist]", "the backend ray")
    bridge = require("ray.util.joblib", "gradguess-lab[dist]", "the backend ray")
    ours = not ray.is_initialized()
    if ours:
        with _explained_cluster("Ray", address):
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    bridge.register_ray()
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _dask(address: str | None) -> Iterator[None]:
    distributed = require("distributed", "gradguess-lab[dist]", "the backend dask")
    with _explained_cluster("Dask", address):
        client = distributed.Client(address, timeout=20) if address else distributed.Client(threads_per_worker=1)
    with client:
        yield


@contextlib.contextmanager
def _explained_cluster(what: str, address: str | None) -> Iterator[None]:
    """Turn a failure to connect into one sentence."""
    try:
        yield
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        where = address or "this machine"
        raise GradguessError(f"no {what} cluster answers at {where}: {error}. Check --address.") from error
