"""Run the experiments of the paper in parallel processes, each run once, and write the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess.experiments import interrupts
from gradguess.experiments.backends import Backend, everywhere
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.files import read_json, write_json
from gradguess.experiments.plan import cost, unique

Runs = dict[str, list[TrainConfig]]


def run_directory(out: Path, config: TrainConfig) -> Path:
    """Where a run lives; the same configuration always in the same place, so that it is never run twice."""
    return out / "runs" / config.key


def is_finished(out: Path, config: TrainConfig) -> bool:
    return (run_directory(out, config) / "result.json").exists()


def reproduce(
    runs: Runs,
    out: Path,
    jobs: int,
    on_progress: Callable[[Progress], None] | None = None,
    backend: Backend = "processes",
    address: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All results, finished before or now, and the message of each run that failed, by key.

    Interrupted, it loses at most the epoch that each process is in.
    """
    configs = unique(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "experiments.json", {name: [config.key for config in group] for name, group in runs.items()})
    todo = [config for config in configs if not is_finished(out, config)]
    failures: dict[str, str] = {}
    if todo:
        with _watch(Progress(out, configs), on_progress):
            failures = _run_all(todo, out.resolve(), jobs, backend, address)
    paths = [run_directory(out, config) / "result.json" for config in configs if is_finished(out, config)]
    return [read_json(path, "result") for path in paths], failures


def _run_all(configs: list[TrainConfig], out: Path, jobs: int, backend: Backend, address: str | None) -> dict[str, str]:
    """Run what is not finished; why runs failed, by key."""
    failures: dict[str, str] = {}

    def left() -> list[tuple[TrainConfig, Path]]:
        wanted = [config for config in configs if config.key not in failures and not is_finished(out, config)]
        return [(config, run_directory(out, config)) for config in wanted]

    for key, message in everywhere(_one, left, jobs, backend, address):
        if message:
            failures[key] = message
    return failures


def _one(item: tuple[TrainConfig, Path]) -> tuple[str, str]:
    """A run in a process of its own: its key, and why it failed.

    One thread: at these sizes more threads wait for each other. A failure must not stop the other runs.
    """
    import torch

    from gradguess.experiments.train import train

    torch.set_num_threads(1)
    config, directory = item
    try:
        with interrupts.listening():  # the terminal sends Ctrl-C to every process; the interrupt is the run's result
            train(config, directory)
    except GradguessError as error:
        return config.key, str(error)
    return config.key, ""


class Progress:
    """How far all runs are, read from their logs: processes need not report, a resumed run counts at once."""

    def __init__(self, out: Path, configs: list[TrainConfig]) -> None:
        self.out, self.configs = out, configs
        self.started, self.at_start = time.monotonic(), self._work_done()

    def epochs(self, config: TrainConfig) -> int:
        directory = run_directory(self.out, config)
        if (directory / "result.json").exists():
            return config.epochs
        try:
            return min(config.epochs, (directory / "metrics.jsonl").read_bytes().count(b"\n"))
        except OSError:
            return 0

    def _work_done(self) -> float:
        return sum(cost(config) * self.epochs(config) / config.epochs for config in self.configs)

    @property
    def finished(self) -> int:
        return sum(is_finished(self.out, config) for config in self.configs)

    @property
    def fraction(self) -> float:
        return self._work_done() / sum(map(cost, self.configs))

    @property
    def running(self) -> list[tuple[str, int, int]]:
        """Key, epochs done and epochs in all of the runs that were touched in the last seconds."""
        return [
            (config.key, self.epochs(config), config.epochs)
            for config in self.configs
            if not is_finished(self.out, config) and self._recent(config)
        ]

    def _recent(self, config: TrainConfig) -> bool:
        try:
            touched = (run_directory(self.out, config) / "metrics.jsonl").stat().st_mtime
        except OSError:
            return False
        return time.time() - touched < 60

    @property
    def seconds_left(self) -> float | None:
        """None until there is something to extrapolate from."""
        done = self._work_done()
        rate = (done - self.at_start) / max(time.monotonic() - self.started, 1e-9)
        return (sum(map(cost, self.configs)) - done) / rate if rate > 0 else None


class _watch:
    """Call `on_progress` twice a second from a thread while the block runs, and once at its end."""

    def __init__(self, progress: Progress, on_progress: Callable[[Progress], None] | None) -> None:
        self.progress, self.on_progress = progress, on_progress
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while self.on_progress and not self.stop.wait(0.5):
            self.on_progress(self.progress)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        if self.on_progress:
            self.on_progress(self.progress)
