"""Many runs in processes of this machine. Each result is written when its run ends, and no run is made twice."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradguess_lab.files import explained, write_json
from gradguess_lab.store import find
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.streams.plan import Group
from gradguess_lab.streams.run import run

CURVE_SEED = 0  # of the other seeds the ends of the curve are kept: no figure shows more


def place(out: Path, config: StreamConfig) -> Path:
    """Where the result of a run is written."""
    return out / f"{config.key}.json"


def results(out: Path, configs: Iterable[StreamConfig]) -> list[dict[str, Any]]:
    """The results that are there."""
    return [record for config in configs if (record := find(out, config.key)) is not None]


def best_rate(out: Path, group: Group, entry: StreamConfig) -> float | None:
    """The learning rate whose worse tuning run has the least error; None while it is not known."""
    return _tuned(out, group, entry)[0]


def wanted(out: Path, group: Group) -> Iterator[StreamConfig]:
    """What can be run now: for each entry the next tuning runs, and once its rate is known the reported ones."""
    for entry in group.entries:
        rate, missing = _tuned(out, group, entry)
        yield from missing if rate is None else group.reported(entry, rate)


def _tuned(out: Path, group: Group, entry: StreamConfig) -> tuple[float | None, list[StreamConfig]]:
    """The rate, or the tuning runs that come next.

    A rate of which one run is worse than both of another cannot win any more: its other run is not made.
    """
    if not group.grid:
        return entry.lr, []
    worst = dict.fromkeys(group.grid, -math.inf)
    missing: dict[float, list[StreamConfig]] = {rate: [] for rate in group.grid}
    for config in group.tuning(entry):
        record = find(out, config.key)
        if record is None:
            missing[config.lr].append(config)
        else:
            worst[config.lr] = max(worst[config.lr], math.inf if record["error"] is None else record["error"])
    untried = [missing[rate][0] for rate in group.grid if worst[rate] == -math.inf]
    if untried:
        return None, untried
    best = min((rate for rate in group.grid if not missing[rate]), key=worst.__getitem__, default=None)
    better = [rate for rate in group.grid if missing[rate] and (best is None or worst[rate] < worst[best])]
    return (None, missing[min(better, key=worst.__getitem__)][:1]) if better else (best, [])


def sweep(
    groups: Iterable[Group], out: Path, jobs: int, minutes: float = 0.0, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Run all that is missing. Returns the message of each run that failed, by key.

    Args:
        minutes: stop after this time, 0: never. Runs that are not finished then are lost, the others are kept.
    """
    groups, end = list(groups), time.monotonic() + 60 * minutes if minutes else math.inf
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    given: set[str] = set()
    waiting: dict[concurrent.futures.Future[str], StreamConfig] = {}
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(  # a process for each run, whose memory is its own
        jobs, context, initializer=torch.set_num_threads, initargs=(1,), max_tasks_per_child=1
    )
    try:
        while _hand_out(pool, jobs, groups, out, given, waiting):
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            ended, _ = concurrent.futures.wait(waiting, left, concurrent.futures.FIRST_COMPLETED)
            if not ended:
                say(f"time is up; {len(waiting)} runs were cut short")
                break
            for done in ended:
                config, message = waiting.pop(done), done.result()
                if message.startswith("failed"):
                    failures[config.key] = message
                say(f"{len(given) - len(waiting)} {config.key} {message}")
    finally:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
    return failures


def _hand_out(
    pool: concurrent.futures.Executor,
    jobs: int,
    groups: Sequence[Group],
    out: Path,
    given: set[str],
    waiting: dict[concurrent.futures.Future[str], StreamConfig],
) -> bool:
    """Give the pool what comes next, group by group, as long as there is room. Is there anything to wait for?"""
    for config in (config for group in groups for config in wanted(out, group)):
        if len(waiting) == jobs:
            break
        if config.key not in given and find(out, config.key) is None:
            given.add(config.key)
            waiting[pool.submit(_run, config, out)] = config
    return bool(waiting)


def _run(config: StreamConfig, out: Path) -> str:
    try:
        record = run(config)
        if config.seed != CURVE_SEED:
            record["curve"] = record["curve"][:1] + record["curve"][-1:]
        write_json(place(out, config), record)
    except Exception:
        return "failed " + traceback.format_exc().strip().splitlines()[-1]
    error, ms = (record[name] if record[name] is not None else math.nan for name in ("error", "step_ms"))
    return f"error {error:.4g}, {ms:.2f} ms, {record['memory_mb']:.3g} MB"
