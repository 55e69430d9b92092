"""How far many runs are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gradguess_lab.config import TrainConfig
from gradguess_lab.plan import cost
from gradguess_lab.run_many import is_finished, run_directory


@dataclass(frozen=True)
class Progress:
    """How far all runs are, read from their logs: processes need not report, and a resumed run counts at once."""

    out: Path
    configs: list[TrainConfig]

    def epochs(self, config: TrainConfig) -> int:
        if is_finished(self.out, config):
            return config.epochs
        try:
            return min(config.epochs, self._log(config).read_bytes().count(b"\n"))
        except OSError:
            return 0

    @property
    def finished(self) -> int:
        return sum(is_finished(self.out, config) for config in self.configs)

    @property
    def fraction(self) -> float:
        done = sum(cost(config) * self.epochs(config) / config.epochs for config in self.configs)
        return done / sum(map(cost, self.configs))

    @property
    def running(self) -> list[tuple[str, int, int]]:
        """Key, epochs done and all epochs of each run that has logged an epoch in the last minute."""
        return [
            (config.key, self.epochs(config), config.epochs)
            for config in self.configs
            if not is_finished(self.out, config) and self._recent(config)
        ]

    def _log(self, config: TrainConfig) -> Path:
        return run_directory(self.out, config) / "metrics.jsonl"

    def _recent(self, config: TrainConfig) -> bool:
        try:
            return time.time() - self._log(config).stat().st_mtime < 60
        except OSError:
            return False
