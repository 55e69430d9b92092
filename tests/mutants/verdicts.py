"""What people said of survivors: kept by the text of the line, so that it outlives shifted lines."""

import json
from dataclasses import dataclass
from pathlib import Path

from .find import Mutant, name_of

KINDS = {
    "gap": "a test is missing",
    "equivalent": "no test can tell the difference, and `why` says the reason",
    "loops": "the mutant never ends: its time-out counts as a kill, and `why` says what it waits for",
}


@dataclass(frozen=True)
class Verdict:
    file: str
    function: str
    line: str
    operator: str
    verdict: str
    why: str = ""
    nth: int = 0

    def __post_init__(self) -> None:
        if self.verdict not in KINDS:
            raise ValueError(f"the verdict on `{self.line}` must be one of {list(KINDS)}, found {self.verdict!r}")
        if self.verdict != "gap" and not self.why:
            raise ValueError(f"the verdict {self.verdict!r} on `{self.line}` has no reason: say `why`")

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.line, self.operator, self.nth

    @property
    def name(self) -> str:
        """Of the mutant."""
        return name_of(self.key)


def read(path: Path) -> dict[tuple[str, str, str, str, int], Verdict]:
    verdicts = [Verdict(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    return {verdict.key: verdict for verdict in verdicts}


def blank(mutant: Mutant) -> str:
    """An entry to copy into the file of verdicts and fill in."""
    key = dict(zip(("file", "function", "line", "operator", "nth"), mutant.key, strict=True))
    return json.dumps({**key, "verdict": "", "why": ""}, ensure_ascii=False)
