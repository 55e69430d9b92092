"""How far many runs are, and how long they will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gradguess_lab.config import TrainConfig
from gradguess_lab.plan import cost
from gradguess_lab.run_many import is_finished, run_directory


class Progress:
    """How far all runs are, read from their logs: processes need not report, and a resumed run counts at once."""

    def __init__(self, out: Path, configs: list[TrainConfig]) -> None:
        self.out, self.configs = out, configs
        self.started, self.at_start = time.monotonic(), self._work_done()

    def epochs(self, config: TrainConfig) -> int:
        directory = run_directory(self.out, config)
        if is_finished(self.out, config):
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
        """Key, epochs done and all epochs of each run that has logged an epoch in the last minute."""
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


class watched:
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
