"""`python -m mutants`: see docs/mutants.md."""

import argparse
import json
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Lock

from . import page, record, verdicts
from .covering import Map, measure
from .find import Mutant
from .listing import Listing, draw
from .record import Result
from .run import Run, unsteady
from .settings import Settings

LONG = 1e6  # seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")
    parser.add_argument("--seconds", type=float, default=LONG, help="stop after them; the next call goes on")
    parser.add_argument("--out", type=Path, help="a folder for copies of what is made, as it is made")
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="run the tests once and note which lines each of them runs")
    mapping.add_argument("--store", type=int, metavar="N", help="write the committed map too: N tests for a statement")
    mapping.add_argument("--each", type=float, default=LONG, help="leave out tests that take more seconds")
    mapping.add_argument("tests", nargs="*", help="for pytest: all of them, unless given")
    listing = commands.add_parser("list", help="write a sample of mutants to a file, to run it elsewhere")
    running = commands.add_parser("run", help="run a sample of mutants")
    for command in (listing, running):
        command.add_argument("--sample", type=int, default=40)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--only", action="append", default=[], metavar="PATH", help="a file or folder to draw from"
        )
    listing.add_argument("file", type=Path)
    running.add_argument("--list", type=Path, metavar="FILE", help="run these instead of drawing a sample")
    running.add_argument("--tests", type=int, help="the most tests for a mutant; survivors of fewer run again")
    given, more = parser.parse_known_args(arguments)
    if more and given.command != "map":
        parser.error(f"unknown: {more}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    settings = replace(Settings.read(given.root), given_commit=given.commit)
    if given.command == "map":
        seconds = None if given.seconds == LONG else given.seconds
        return make_map(settings, [*given.tests, *more], given.jobs, given.store, seconds, given.each, given.out)
    if given.command == "list":
        draw(settings, given.sample, given.seed, given.only).write(given.file)
        return 0
    if given.tests is not None:
        settings = replace(settings, tests=given.tests)
    if given.list:
        drawn = Listing.read(given.list)
        settings = replace(settings, given_commit=given.commit or drawn.commit)
    else:
        drawn = draw(settings, given.sample, given.seed, given.only)
    return run(settings, drawn, given.jobs, given.seconds, given.out)


def make_map(
    settings: Settings,
    tests: list[str],
    jobs: int,
    store: int | None,
    seconds: float | None,
    each: float,
    out: Path | None,
) -> int:
    if not tests and settings.map.exists() and Map.read(settings.map).commit == settings.commit:
        print(f"{settings.map} is up to date")
        made = Map.read(settings.map)
    else:
        made = measure(settings, tests, jobs, seconds, each)
    print(f"{len(made.tests)} tests, {sum(seconds for _, seconds in made.tests):.0f} seconds")
    if store:
        made.shortened(store).write(settings.stored_map)
    if out:
        shutil.copy(settings.map, out)
    return 0


def read_map(settings: Settings) -> Map:
    """The map of an earlier commit serves too: it is kept by function, and a changed one has the tests of all of it."""
    for path in (settings.map, settings.stored_map):
        if path.exists():
            return Map.read(path)
    raise FileNotFoundError(f"{settings.map} is not there: make it first, `make coverage-map`")


def run(settings: Settings, drawn: Listing, jobs: int, seconds: float, out: Path | None) -> int:
    """Run what has no result yet, check the tests that killed, and write the page."""
    end = time.monotonic() + seconds
    known = read_map(settings)
    lock = Lock()

    def done(mutant: Mutant, result: Result) -> None:
        with lock:
            record.append(settings.results, result)
            copy_out()
            where = f"{mutant.file}:{mutant.number}"
            print(f"{result.outcome:11} {result.seconds:6.1f} s  {where}  {result.after}", flush=True)

    def copy_out() -> None:
        for path in (settings.results, settings.unsteady, settings.page) if out else ():
            if path.exists():
                shutil.copy(path, out)

    while True:
        how = Run(settings, known, drawn, frozenset(_unsteady(settings)))
        results = _results(settings, drawn)
        waiting = [m for m in drawn.mutants if m.name not in results or _met_too_few(how, m, results[m.name])]
        total, commit = len(drawn.mutants), known.commit
        print(f"{total} of {drawn.drawn_from} mutants, {len(waiting)} to run; map of {commit}", flush=True)
        if waiting:
            how.all(waiting, jobs, done, end - time.monotonic())
        results = _results(settings, drawn)
        left = total - len(results)
        if left or check_killers(settings, results, jobs, end - time.monotonic()):
            break
    said = verdicts.read(settings.verdicts)
    judged = [(m, results[m.name], said.get(m.key)) for m in drawn.mutants if m.name in results]
    stale = [v for v in said.values() if v.name not in drawn.present]
    settings.page.write_text(page.survivors(judged, stale, settings))
    copy_out()
    print(f"\n{settings.page}\n\n" + "\n".join(page.table(judged, settings)), flush=True)
    if left:
        print(f"{left} of {total} have not been run: run it again, it goes on", flush=True)
    return 0


def check_killers(settings: Settings, results: dict[str, Result], jobs: int, seconds: float) -> bool:
    """A test that fails without a mutant has killed nothing: run those that killed once more, without one.

    What fails is noted as unsteady, and its kills no longer count. Whether there is nothing to run again.
    """
    checked = set(_unsteady(settings, "steady"))
    killers = sorted({r.killer for r in results.values() if r.outcome == "killed"} - checked - {""})
    if not killers:
        return True
    failed, met = unsteady(settings, killers, jobs, seconds)
    noted = {
        "commit": settings.commit,
        "unsteady": sorted({*_unsteady(settings), *failed}),
        "steady": sorted(checked | (set(met) - set(failed))),
    }
    settings.unsteady.write_text(json.dumps(noted, indent=1))
    if failed:
        print(f"they fail without a mutant, and kill nothing: {failed}", flush=True)
    return not failed


def _unsteady(settings: Settings, kind: str = "unsteady") -> list[str]:
    noted = json.loads(settings.unsteady.read_text()) if settings.unsteady.exists() else {}
    return noted[kind] if noted.get("commit") == settings.commit else []


def _results(settings: Settings, drawn: Listing) -> dict[str, Result]:
    found = record.read(settings.results)
    keys = {m.name: (settings.commit, drawn.seed, m.name) for m in drawn.mutants}
    unsteady = set(_unsteady(settings))
    return {name: found[key] for name, key in keys.items() if key in found and found[key].killer not in unsteady}


def _met_too_few(how: Run, mutant: Mutant, result: Result) -> bool:
    """Whether a survivor would meet more tests now: by a better map, or by a higher number of tests."""
    if result.outcome not in ("survived", "timed out"):
        return False
    groups, _ = how.chosen(mutant)
    return sum(map(len, groups)) > result.tests


if __name__ == "__main__":
    sys.exit(main())
