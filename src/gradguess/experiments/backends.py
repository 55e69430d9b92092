"""Where many runs are run: joblib's processes on this machine, or its Ray or Dask backend on a cluster.

Every run lives in a directory of its own, and takes up there what it left (`train`). So a worker that dies costs the
epoch that it was in: whatever is not finished is handed out again, and what is finished is never run twice. The workers
of a cluster must see the directory under the same path.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from gradguess.errors import GradguessError
from gradguess.extras import require

Backend = Literal["processes", "ray", "dask"]
BACKENDS = ("processes", "ray", "dask")
ATTEMPTS = 10  # worker deaths that are taken for bad luck
DEATHS = {  # what joblib's backends raise when a worker was killed, by name: none of them need be installed
    "TerminatedWorkerError",
    "BrokenProcessPool",
    "KilledWorker",
    "CancelledError",
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "ObjectLostError",
}
T = TypeVar("T")
R = TypeVar("R")


def everywhere(
    work: Callable[[T], R], items: Callable[[], Sequence[T]], jobs: int, backend: Backend, address: str | None
) -> Iterator[R]:
    """`work` on all `items()`, one at a time to whoever is free; asked anew for the rest after a worker's death."""
    with _cluster(backend, address):
        for attempt in range(ATTEMPTS):
            try:
                yield from _hand_out(work, items(), jobs, backend)
                return
            except Exception as error:
                if not _is_death(error) or attempt == ATTEMPTS - 1:
                    raise
                time.sleep(1)  # the kernel frees the locks of the dead


def _hand_out(work: Callable[[T], R], items: Sequence[T], jobs: int, backend: Backend) -> Iterator[R]:
    joblib = require("joblib", "cli", "running in parallel")
    if not items:
        return
    name = "loky" if backend == "processes" else backend
    with joblib.parallel_config(backend=name, n_jobs=max(1, jobs)):
        # Ray's pool returns all at the end; the results are in the directories long before.
        pool = joblib.Parallel(
            batch_size=1, pre_dispatch="all", return_as="list" if backend == "ray" else "generator_unordered"
        )
        yield from pool(joblib.delayed(work)(item) for item in items)


def _is_death(error: BaseException | None) -> bool:
    while error is not None:
        if DEATHS & {kind.__name__ for kind in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _cluster(backend: Backend, address: str | None) -> Iterator[None]:
    if backend not in BACKENDS:
        raise GradguessError(f"--backend must be one of {', '.join(BACKENDS)}, found {backend!r}.")
    if address is not None and backend == "processes":
        raise GradguessError("--address needs --backend ray or --backend dask.")
    with {"processes": _processes, "ray": _ray, "dask": _dask}[backend](address):
        yield


@contextlib.contextmanager
def _processes(address: str | None) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    ray = require("ray", "dist", "the backend ray")
    joint = require("ray.util.joblib", "dist", "the backend ray")
    ours = not ray.is_initialized()
    if ours:
        with _reached("Ray", address):
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    joint.register_ray()
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _dask(address: str | None) -> Iterator[None]:
    distributed = require("distributed", "dist", "the backend dask")
    with _reached("Dask", address):
        client = distributed.Client(address, timeout=20) if address else distributed.Client(threads_per_worker=1)
    with client:
        yield


@contextlib.contextmanager
def _reached(what: str, address: str | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        raise GradguessError(f"no {what} cluster answers at {address or 'this machine'}: {error}") from error
