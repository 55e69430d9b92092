"""Tasks in processes of their own that get ready side by side and are timed one after the other.

Compiling takes minutes and many cores, timing takes seconds and a quiet machine. So while one process is timed, the
others have nothing to do, or wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from gradguess.errors import GradguessError
from gradguess_lab.bench import tasks
from gradguess_lab.bench.choosing import LOCK
from gradguess_lab.bench.tasks import Job

Rows = list[dict[str, Any]]


def in_turns(jobs: Mapping[str, Job], together: int, say: Callable[[str], None]) -> Iterator[tuple[str, Rows | str]]:
    """The rows of each job, or why it failed. So many processes get ready `together`."""
    names = list(jobs)
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // together))}
    for first in range(0, len(names), together):
        chosen = names[first : first + together]
        with contextlib.ExitStack() as stack:
            say(f"starting {', '.join(chosen)}")
            lock = stack.enter_context(tempfile.NamedTemporaryFile())
            variables = {**threads, **os.environ, LOCK: lock.name}
            batch = {name: stack.enter_context(_child(jobs[name], variables)) for name in chosen}
            for child in batch.values():
                while child.out.readline() not in ("ready\n", ""):  # nothing comes from one that failed
                    pass
            for name, child in batch.items():
                say(f"timing {name}")
                yield name, child.go()


@dataclass
class _Child:
    process: subprocess.Popen[str]
    out: IO[str]
    errors: IO[str]

    def go(self) -> Rows | str:
        """Let it go on, and wait for its rows."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        said = self.out.read().splitlines()
        if self.process.wait() == 0:
            found: Rows = json.loads(said[-1])
            return found
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["no message"])[-1]


@contextlib.contextmanager
def _child(job: Job, variables: Mapping[str, str]) -> Iterator[_Child]:
    """A process with one job, which ends with the block."""
    command, pipe = [sys.executable, "-m", tasks.__name__, "time", job.as_json()], subprocess.PIPE
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables)
        assert process.stdout is not None
        try:
            yield _Child(process, process.stdout, errors)
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.__exit__(None, None, None)  # closes the pipes and waits


def failed(reasons: Mapping[str, str]) -> GradguessError:
    """One error for all jobs that failed."""
    return GradguessError("; ".join(f"timing {name} failed: {why}" for name, why in reasons.items()))
