"""Results, one line of JSON each, appended as they end: a killed run goes on where it stopped."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    commit: str  # of the source
    seed: int
    name: str  # of the mutant
    outcome: str  # killed, survived, timed out or incompetent
    before: str  # the line
    after: str
    seconds: float = 0.0
    tests: int = 0  # that were chosen
    covering: int = 0  # that run the line
    killer: str = ""  # the first test that failed, or the one that did not end
    apart: bool = False  # it is one of those that run apart

    @property
    def key(self) -> tuple[str, int, str]:
        return self.commit, self.seed, self.name


def append(path: Path, result: Result) -> None:
    """In one write, on a line of its own even if the last run was killed while writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        start = b""
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            start = b"" if file.read(1) == b"\n" else b"\n"
        file.write(start + json.dumps(asdict(result), ensure_ascii=False).encode() + b"\n")


def read(path: Path) -> dict[tuple[str, int, str], Result]:
    """The last result of each key. A line that was cut short is passed over."""
    return {result.key: result for result in _lines(path)}


def _lines(path: Path) -> Iterator[Result]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield Result(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
