"""`python -m mutants`: see docs/mutants.md."""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path
from threading import Lock

from . import page, record, verdicts
from .code import Code
from .covering import Map, measure
from .find import Mutant, all_mutants, sample
from .record import Result
from .run import START, run_all, run_tests
from .settings import Settings
from .trees import make_trees, remove_trees


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="run the tests once and note which lines each of them runs")
    mapping.add_argument("--store", type=int, metavar="N", help="write the committed map too: N tests for a statement")
    mapping.add_argument("tests", nargs="*", help="for pytest: all of them, unless given")
    running = commands.add_parser("run", help="run a sample of mutants")
    running.add_argument("--sample", type=int, default=40)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--only", action="append", default=[], metavar="PATH", help="a file or folder to draw from")
    running.add_argument("--tests", type=int, help="the most tests for a mutant; survivors of fewer run again")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    settings = Settings.read(given.root)
    if given.command == "map":
        return make_map(settings, given.tests, given.jobs, given.store)
    if given.tests is not None:
        settings = replace(settings, tests=given.tests)
    return run(settings, given.sample, given.seed, given.jobs, given.only)


def make_map(settings: Settings, tests: list[str], jobs: int, store: int | None) -> int:
    if not tests and settings.map.exists() and Map.read(settings.map).commit == settings.commit:
        print(f"{settings.map} is up to date")
        made = Map.read(settings.map)
    else:
        made = measure(settings, tests, jobs)
    if store:
        made.shortened(store).write(settings.stored_map)
    return 0


def read_map(settings: Settings) -> Map:
    """The map of an earlier commit serves too: it is kept by function, and a changed one has the tests of all of it."""
    for path in (settings.map, settings.stored_map):
        if path.exists():
            return Map.read(path)
    raise FileNotFoundError(f"{settings.map} is not there: make it first, `make coverage-map`")


def run(settings: Settings, size: int, seed: int, jobs: int, only: list[str]) -> int:
    known, mutants = read_map(settings), all_mutants(settings)
    inside = [m for m in mutants if not only or any(Path(m.file).is_relative_to(path) for path in only)]
    chosen = sample(inside, size, seed)
    results = _results(settings, chosen, seed)
    waiting = [m for m in chosen if m.name not in results or _met_too_few(m, results[m.name], known, settings)]
    print(f"{len(chosen)} of {len(mutants)} mutants, {len(waiting)} to run; map of {known.commit}", flush=True)
    lock = Lock()

    def done(mutant: Mutant, result: Result) -> None:
        with lock:
            record.append(settings.results, result)
            where = f"{mutant.file}:{mutant.number}"
            print(f"{result.outcome:11} {result.seconds:6.1f} s  {where}  {result.after}", flush=True)

    if waiting:
        run_all(settings, known, waiting, seed, jobs, done)
        check_killers(settings, {record.read(settings.results)[settings.commit, seed, m.name].killer for m in waiting})
    results = _results(settings, chosen, seed)
    said = verdicts.read(settings.verdicts)
    judged = [(m, results[m.name], said.get(m.key)) for m in chosen]
    present = {m.key for m in mutants}
    settings.page.write_text(page.survivors(judged, [v for k, v in said.items() if k not in present], settings))
    print(f"\n{settings.page}\n\n" + "\n".join(page.table(judged, settings)), flush=True)
    return 0


def check_killers(settings: Settings, killers: set[str]) -> None:
    """A test that fails without a mutant has killed nothing: run those that killed once more, without one."""
    tests = sorted(killers - {""})
    if not tests:
        return
    try:
        ended = run_tests(make_trees(settings, 1)[0], tests, START + 10 * settings.limit)
    finally:
        remove_trees(settings)
    if ended.code != 0:
        raise RuntimeError(f"{ended.failed or tests} failed without a mutant: mend that, and delete {settings.results}")


def _results(settings: Settings, chosen: list[Mutant], seed: int) -> dict[str, Result]:
    found = record.read(settings.results)
    keys = {m.name: (settings.commit, seed, m.name) for m in chosen}
    return {name: found[key] for name, key in keys.items() if key in found}


def _met_too_few(mutant: Mutant, result: Result, known: Map, settings: Settings) -> bool:
    """Whether a survivor would meet more tests now: by a better map, or by a higher number of tests."""
    if result.outcome not in ("survived", "timed out"):
        return False
    covering = known.covering(Code((settings.root / mutant.file).read_text()), mutant)
    return len(known.choose(covering, mutant.file, settings)) > result.tests


if __name__ == "__main__":
    sys.exit(main())
