"""Run mutants against their tests, several at a time, each in a tree of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from .code import Code
from .covering import Map, environment_of
from .find import Mutant, changed_line, mutated
from .record import Result
from .settings import Settings
from .trees import make_trees, put, remove_trees

START = 30.0  # seconds that pytest may take to start and to collect, on a busy machine
SLOWER = 4.0  # a mutant may take that many times the seconds that its tests took without it
OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "mutants.plugin")


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: the time ran out
    failed: list[str]  # the tests
    seconds: float


def run_all(
    settings: Settings, known: Map, mutants: list[Mutant], seed: int, jobs: int, done: Callable[[Mutant, Result], None]
) -> None:
    """Run mutants in parallel. `done` hears of each as it ends, in the thread of its job."""
    trees: SimpleQueue[Path] = SimpleQueue()
    stopped = Event()
    for tree in make_trees(settings, jobs):
        trees.put(tree)

    def one(mutant: Mutant) -> None:
        tree = trees.get()
        try:
            result = run_one(settings, known, mutant, seed, tree)
            if not stopped.is_set():  # else its tests were ended from here
                done(mutant, result)
        finally:
            trees.put(tree)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(one, mutant) for mutant in mutants]:
            future.result()
    except BaseException:
        stopped.set()
        for group in list(_running):
            _end(group)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        remove_trees(settings)


def run_one(settings: Settings, known: Map, mutant: Mutant, seed: int, tree: Path) -> Result:
    """Put a mutant into a tree, run its tests, put the source back."""
    text = (settings.root / mutant.file).read_text()
    changed = mutated(text, mutant)
    covering = known.covering(Code(text), mutant)
    chosen = known.choose(covering, mutant.file, settings)
    result = Result(settings.commit, seed, mutant.name, "survived", *changed_line(text, changed))
    result = replace(result, tests=len(chosen), covering=len(covering))
    if not compiles(changed):
        return replace(result, outcome="incompetent")
    if not chosen:
        return result
    limit = min(settings.limit, START + SLOWER * sum(seconds for _, seconds in chosen))
    put(tree, mutant.file, changed)
    try:
        ended = run_tests(tree, [test for test, _ in chosen], limit)
        outcome = outcome_of(ended, lambda: imports(tree, mutant.file))
    finally:
        put(tree, mutant.file, text)
    return replace(result, outcome=outcome, seconds=round(ended.seconds, 2), killer=next(iter(ended.failed), ""))


def outcome_of(ended: Ended, can_import: Callable[[], bool]) -> str:
    """A mutant that cannot be imported is incompetent; one that makes pytest fail in any other way is killed."""
    if ended.code is None:
        return "timed out"
    if ended.code == 0:
        return "survived"
    if ended.code == 5:
        raise RuntimeError("the map names tests that are no longer there: make it again, `make coverage-map`")
    return "killed" if ended.failed or can_import() else "incompetent"


def run_tests(tree: Path, tests: list[str], limit: float) -> Ended:
    """One pytest for the tests, in the given order, until the first fails. At the time limit its whole group ends."""
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    with tempfile.TemporaryDirectory() as folder:
        chosen, killer = Path(folder) / "chosen.json", Path(folder) / "killer"
        chosen.write_text(json.dumps(tests))
        environment = environment_of(
            tree, MUTANTS_CHOSEN=str(chosen), MUTANTS_KILLER=str(killer), MUTANTS_ALARM=str(int(limit) + 30)
        )
        seeded = ("--hypothesis-seed=0",) if "hypothesis" in installed() else ()
        command = [sys.executable, "-m", "pytest", *OPTIONS, *seeded, *files]
        began = time.monotonic()
        code = run_group(command, tree, environment, limit)
        failed = killer.read_text().split("\n")[:-1] if killer.exists() else []
        return Ended(code, failed, time.monotonic() - began)


def run_group(command: list[str], cwd: Path, environment: dict[str, str], limit: float) -> int | None:
    """A command in a process group of its own, which ends with it. None: it took longer than the limit."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    _running.add(process.pid)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _running.discard(process.pid)
        _end(process.pid)
        process.wait()


_running: set[int] = set()


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # what the tests started as well


def imports(tree: Path, file: str) -> bool:
    """Whether a module of a tree can be imported."""
    parts = Path(file).with_suffix("").parts
    module = ".".join(p for p in parts[1:] if p != "__init__")  # below `src`
    return run_group([sys.executable, "-c", f"import {module}"], tree, environment_of(tree), START) == 0


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def installed() -> set[str]:
    from importlib.util import find_spec

    return {name for name in ("hypothesis",) if find_spec(name)}
