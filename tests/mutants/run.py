"""Run mutants against their tests, several at a time, each in a tree of its own."""

import json
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
from threading import Event, Timer

from .code import Code
from .covering import Map, Timed, environment_of, hypothesis
from .find import Mutant, changed_line
from .listing import Listing
from .record import Result
from .settings import Settings
from .trees import make_trees, put, remove_trees

START = 20.0  # seconds that pytest may take to start and to collect, on a busy machine
SLOWER = 4.0  # a mutant may take that many times the seconds that its tests took without it
OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "mutants.plugin")


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: the time ran out
    failed: list[str]  # the tests
    seconds: float
    last: str = ""  # the test that was started last


class Worker:
    """A tree, and a process that has imported what all tests need and forks for each run of them (server.py)."""

    def __init__(self, settings: Settings, tree: Path) -> None:
        self.settings = settings
        self.tree = tree
        self.ended = False
        self._server: subprocess.Popen[bytes] | None = None

    def run_tests(self, tests: list[str], limit: float) -> Ended:
        """One pytest for the tests, in the given order, until the first fails. At the time limit its group ends."""
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            chosen, killer, last = (Path(folder) / name for name in ("chosen.json", "killer", "last"))
            chosen.write_text(json.dumps(tests))
            environment = environment_of(
                self.settings,
                self.tree,
                MUTANTS_CHOSEN=str(chosen),
                MUTANTS_KILLER=str(killer),
                MUTANTS_LAST=str(last),
                PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            )
            seeded = ("--hypothesis-seed=0",) if hypothesis() else ()
            arguments = [*OPTIONS, *hypothesis(), *seeded, f"--basetemp={folder}/pytest", *files]
            began = time.monotonic()
            code = self._ask(arguments, environment, limit)
            failed = killer.read_text().split("\n")[:-1] if killer.exists() else []
            started = last.read_text() if last.exists() else ""
            return Ended(code, failed, time.monotonic() - began, started)

    def _ask(self, arguments: list[str], environment: dict[str, str], limit: float) -> int | None:
        server = self._server
        if self.ended:
            raise RuntimeError(f"the worker of {self.tree} has ended")
        if server is None:
            command = [sys.executable, "-P", "-m", "mutants.server", *self.settings.preload]
            quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
            server = self._server = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=quiet, start_new_session=True
            )
        request = {"cwd": str(self.tree), "environment": environment, "arguments": arguments, "limit": limit}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of {self.tree} ended with {server.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        """Close the server's input: it ends, with the pytest that it waits for."""
        self.ended = True
        server, self._server = self._server, None
        if server is not None and server.stdin is not None:
            with suppress(OSError):
                server.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()
            server.wait()


@dataclass
class Workers:
    """Several workers, and what stops them all."""

    settings: Settings
    jobs: int

    def __post_init__(self) -> None:
        self.stopped = Event()
        self._all = [Worker(self.settings, tree) for tree in make_trees(self.settings, self.jobs)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._all:
            self._free.put(worker)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        remove_trees(self.settings)

    def stop(self) -> None:
        self.stopped.set()
        for worker in self._all:
            worker.end()

    def map(self, work: Callable[[Worker, int], None], count: int) -> None:
        """Do pieces of work, by their numbers, each by a free worker. What goes wrong after a stop is passed over."""

        def one(number: int) -> None:
            worker = self._free.get()
            try:
                if not self.stopped.is_set():
                    work(worker, number)
            except Exception:
                if not self.stopped.is_set():
                    raise
            finally:
                self._free.put(worker)

        pool = ThreadPoolExecutor(self.jobs)
        try:
            for future in [pool.submit(one, number) for number in range(count)]:
                future.result()
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Run:
    """What a run of mutants needs to know."""

    settings: Settings
    known: Map
    listing: Listing
    unsteady: frozenset[str] = frozenset()

    def chosen(self, mutant: Mutant) -> tuple[list[list[Timed]], int]:
        """The tests of a mutant in the order of the runs, those apart last, and how many run its line."""
        covering = self.known.covering(Code((self.settings.root / mutant.file).read_text()), mutant)
        covering = [t for t in covering if self.known.tests[t][0] not in self.unsteady]
        return self.known.choose(covering, mutant.file, self.settings), len(covering)

    def all(self, mutants: list[Mutant], jobs: int, done: Callable[[Mutant, Result], None], seconds: float) -> None:
        """Run mutants in parallel. `done` hears of each as it ends, in the thread of its job.

        After so many seconds everything stops. What had not ended is run the next time.
        """
        with Workers(self.settings, min(jobs, len(mutants))) as workers:
            timer = Timer(seconds, workers.stop)
            timer.daemon = True
            timer.start()

            def one(worker: Worker, number: int) -> None:
                result = self.one(mutants[number], worker)
                if not workers.stopped.is_set():  # else its tests were ended from here
                    done(mutants[number], result)

            try:
                workers.map(one, len(mutants))
            finally:
                timer.cancel()

    def one(self, mutant: Mutant, worker: Worker) -> Result:
        """Put a mutant into a tree, run its tests, put the source back."""
        text = (self.settings.root / mutant.file).read_text()
        changed = self.listing.mutated(text, mutant)
        groups, covering = self.chosen(mutant)
        result = Result(self.settings.commit, self.listing.seed, mutant.name, "survived", *changed_line(text, changed))
        result = replace(result, tests=sum(map(len, groups)), covering=covering)
        if not compiles(changed):
            return replace(result, outcome="incompetent")
        put(worker.tree, mutant.file, changed)
        try:
            for apart, group in enumerate(groups):
                if not group:
                    continue
                limit = min(self.settings.limit, START + SLOWER * sum(seconds for _, seconds in group))
                ended = worker.run_tests([test for test, _ in group], limit)
                outcome = outcome_of(ended, lambda: imports(self.settings, worker.tree, mutant.file))
                killer = "" if outcome == "survived" else next(iter(ended.failed), ended.last)
                seconds = round(result.seconds + ended.seconds, 2)
                result = replace(result, outcome=outcome, seconds=seconds, killer=killer, apart=bool(apart))
                if outcome != "survived":
                    break
        finally:
            put(worker.tree, mutant.file, text)
        return result


def unsteady(settings: Settings, tests: list[str], jobs: int, seconds: float) -> tuple[list[str], list[str]]:
    """Run tests without a mutant: those that fail, and those that were run."""
    parts = [tests[i::jobs] for i in range(min(jobs, len(tests)))]
    failed: list[str] = []
    met: list[str] = []
    with Workers(settings, len(parts)) as workers:
        timer = Timer(seconds, workers.stop)
        timer.daemon = True
        timer.start()

        def part(worker: Worker, number: int) -> None:
            left = list(parts[number])
            while left and not workers.stopped.is_set():
                ended = worker.run_tests(left, START + 10 * settings.limit)
                if workers.stopped.is_set():
                    return
                bad = next(iter(ended.failed), ended.last) if ended.code != 0 else ""
                if ended.code != 0 and not bad:
                    raise RuntimeError(f"pytest ended with {ended.code} without a mutant, on {left}: run it by hand")
                failed.extend([bad] if bad else [])
                done = left[: left.index(bad) + 1] if bad in left else left
                met.extend(done)
                left = left[len(done) :]

        try:
            workers.map(part, len(parts))
        finally:
            timer.cancel()
    return failed, met


def outcome_of(ended: Ended, can_import: Callable[[], bool]) -> str:
    """A mutant that cannot be imported is incompetent; one that makes pytest fail in any other way is killed.

    One that gives the tests other names, so that none of them is found, is not killed by that.
    """
    if ended.code is None:
        return "timed out"
    if ended.code in (0, 5):
        return "survived"
    return "killed" if ended.failed or can_import() else "incompetent"


def imports(settings: Settings, tree: Path, file: str) -> bool:
    """Whether a module of a tree can be imported."""
    parts = Path(file).with_suffix("").parts
    module = ".".join(p for p in parts[1:] if p != "__init__")  # below `src`
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, cwd=tree, env=environment_of(settings, tree), capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
