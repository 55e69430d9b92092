"""Many runs: in processes of this machine by joblib, or on a cluster of Ray or Dask.

Every run lives in a directory of its own and continues there from its last epoch (`train`). So a worker that dies costs
the epoch that it was in: what is not finished is handed out again, and what is finished is never run twice. The workers
of a cluster must see the directory under the same path.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Iterator
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
    import joblib

    configs, out, failures = list(configs), out.resolve(), dict[str, str]()
    name = "loky" if backend == "processes" else backend
    # Ray's pool returns everything at the end; the results are in the directories long before
    order = "list" if backend == "ray" else "generator_unordered"
    with _cluster(backend, address), joblib.parallel_config(backend=name, n_jobs=max(1, jobs)):
        for attempt in range(1, ATTEMPTS + 1):
            left = [c for c in configs if c.key not in failures and not is_finished(out, c)]
            pool = joblib.Parallel(batch_size=1, pre_dispatch="all", return_as=order)
            try:
                ended = pool(joblib.delayed(_run_one)(config, run_directory(out, config)) for config in left)
                failures.update(failure for failure in ended if failure[1])
                break
            except Exception:  # a worker died: what a run raises is among the failures
                if attempt == ATTEMPTS:
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
                ray = require("ray", "gradguess-lab[dist]", "the backend ray")
                if not ray.is_initialized():
                    ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
                    held.callback(ray.shutdown)
                require("ray.util.joblib", "gradguess-lab[dist]", "the backend ray").register_ray()
            elif backend == "dask":
                client = require("distributed", "gradguess-lab[dist]", "the backend dask").Client
                held.enter_context(client(address, timeout=20) if address else client(threads_per_worker=1))
        except (OSError, ValueError, RuntimeError) as error:
            where = address or "this machine"
            raise GradguessError(f"no {backend} cluster answers at {where}: {error}. Check --address.") from error
        yield
