"""Other processes: wait for what they do, and see them end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said on its way out; one that does not end is ended."""
    try:
        return process.communicate(timeout=30)[1]
    finally:
        process.kill()
