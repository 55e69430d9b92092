"""Which tests run a line: measured once by coverage.py, kept by function so that it outlives shifted lines."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .code import Code
from .find import Mutant
from .settings import Settings, matches

Timed = tuple[str, float]  # a test and its seconds

TOOL = Path(__file__).resolve().parents[1]  # the folder to import this package from

CONFIGURATION = """\
[run]
data_file = {data}
source = {source}
parallel = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-ctracer, couldnt-parse
"""
CHILDREN = "context = ${PYTEST_CURRENT_TEST-}\nsigterm = true\npatch = _exit\n"
"""A process that a test starts takes the test's name from the environment, where pytest puts it."""


@dataclass
class Function:
    """The tests of a function's statements, by their distance from its first line."""

    digest: str
    statements: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Map:
    """Tests with their seconds, fastest first, and the functions that they run, by `file::function`."""

    commit: str
    tests: list[Timed]
    functions: dict[str, Function]

    def covering(self, code: Code, mutant: Mutant) -> list[int]:
        """The tests that run the statement of a mutant, fastest first.

        A statement at import has those of the functions that can show what it does. A function that has changed since
        the map was made has those of all its statements. A new one has those of the files that bear its module's name.
        """
        statement = code.statement_at(mutant.number)
        if statement.at_import:
            found = {t for f in code.functions_for(statement) for t in self._all(mutant.file, f)}
        else:
            known = self.functions.get(f"{mutant.file}::{statement.scope}")
            if known and known.digest == code.digest(statement.scope):
                found = set(known.statements.get(statement.first - code.scopes[statement.scope].lineno, []))
                return sorted(found)
            found = set(self._all(mutant.file, statement.scope))
        if not found and not any(name.startswith(f"{mutant.file}::") for name in self.functions):
            found = {i for i, (test, _) in enumerate(self.tests) if mirrors(test, mutant.file)}
        return sorted(found)

    def _all(self, file: str, function: str) -> Iterable[int]:
        known = self.functions.get(f"{file}::{function}")
        return {t for tests in known.statements.values() for t in tests} if known else ()

    def choose(self, covering: list[int], file: str, settings: Settings) -> list[list[Timed]]:
        """Tests for a mutant, fastest first: in a first group all but those that run apart, these in a second.

        Tests whose file is gone are left out: the map may be older than the tree.
        """
        files = {self.tests[t][0].split("::")[0] for t in covering}
        gone = {file for file in files if not (settings.root / file).exists()}
        covering = [t for t in covering if self.tests[t][0].split("::")[0] not in gone]
        groups: tuple[list[int], list[int]] = [], []
        for test in covering:
            groups[matches(self.tests[test][0], settings.apart)].append(test)
        return [self._choose(group, file, settings) for group in groups]

    def _choose(self, covering: list[int], file: str, settings: Settings) -> list[Timed]:
        """One case of each test function, then a second one of each, and so on, as long as the time allows.

        Then some more of those that bear the module's name, or that are always chosen.
        """
        waiting = self._by_turns(covering)
        named = [t for t in waiting if mirrors(self.tests[t][0], file) or matches(self.tests[t][0], settings.always)]
        chosen: dict[int, float] = {}
        for group, most in ((waiting, settings.tests), (named, settings.tests + settings.mirrored)):
            for test in group:
                seconds = self.tests[test][1]
                fits = not chosen or sum(chosen.values()) + seconds <= settings.seconds
                if fits and len(chosen) < most:
                    chosen[test] = seconds
        return [self.tests[t] for t in sorted(chosen)]

    def _by_turns(self, covering: list[int]) -> list[int]:
        """The cases of a test function in a mixed order, the faster half first: its fastest cases are often alike."""
        cases: dict[str, list[int]] = defaultdict(list)
        for test in covering:
            cases[self.tests[test][0].split("[")[0]].append(test)
        turn = {}
        for own in cases.values():
            half = own[len(own) // 2]
            mixed = sorted(own, key=lambda t: (t > half, hashlib.sha1(self.tests[t][0].encode()).digest()))
            turn |= {test: i for i, test in enumerate(mixed)}
        return sorted(covering, key=lambda t: (turn[t], t))

    def shortened(self, most: int) -> "Map":
        """With the fastest tests alone, and the fastest that bear the module's name: small enough to be committed."""
        functions = {}
        for name, function in self.functions.items():
            file = name.split("::")[0]
            cut = {
                at: tests[:most] + [t for t in tests[most:] if mirrors(self.tests[t][0], file)][: most // 2]
                for at, tests in function.statements.items()
            }
            functions[name] = Function(function.digest, cut)
        used = sorted({t for f in functions.values() for tests in f.statements.values() for t in tests})
        place = {test: i for i, test in enumerate(used)}
        for function in functions.values():
            function.statements = {at: [place[t] for t in tests] for at, tests in function.statements.items()}
        return Map(self.commit, [self.tests[t] for t in used], functions)

    def write(self, path: Path) -> None:
        lists: dict[tuple[int, ...], int] = {}
        functions = {
            name: [f.digest, {at: lists.setdefault(tuple(tests), len(lists)) for at, tests in f.statements.items()}]
            for name, f in self.functions.items()
        }
        text = json.dumps(
            {"commit": self.commit, "tests": self.tests, "functions": functions, "lists": [list(k) for k in lists]},
            separators=(",", ":"),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(gzip.compress(text.encode(), mtime=0))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Map":
        table = json.loads(gzip.decompress(path.read_bytes()))
        functions = {
            name: Function(digest, {int(at): table["lists"][i] for at, i in statements.items()})
            for name, (digest, statements) in table["functions"].items()
        }
        return cls(table["commit"], [(name, seconds) for name, seconds in table["tests"]], functions)


@cache
def mirrors(test: str, file: str) -> bool:
    """Whether a test's file bears the name of a module or of its package, or is the module: its doctests.

    >>> mirrors("tests/linalg/test_subspaces.py::test_x", "src/pkg/linalg/subspaces.py")
    True
    >>> mirrors("tests/test_step.py::test_x", "src/pkg/linalg/subspaces.py")
    False
    """
    at, module = Path(test.split("::")[0]), Path(file)
    name = module.parent.name if module.stem == "__init__" else module.stem
    return at == module or at.stem.removeprefix("test_") == name.strip("_") or at.parent.name == name


def measure(settings: Settings, arguments: list[str], jobs: int, seconds: float | None, each: float) -> Map:
    """Run the tests once under coverage.py, with a context for each, and write the map.

    Tests that take longer than `each`, and those that have not begun after `seconds`, are not in it.
    """
    settings.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.build, prefix="coverage-") as folder:
        data, times = Path(folder) / "data", Path(folder) / "times.json"
        text = CONFIGURATION.format(data=data, source=settings.root / "src")
        main, children = Path(folder) / "main.cfg", Path(folder) / "children.cfg"
        main.write_text(text)
        children.write_text(text + CHILDREN)
        site = Path(folder) / "site"  # for processes that tests start, where coverage.py has not set this up itself
        site.mkdir()
        (site / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        python = [sys.executable, "-m", "pytest", "-p", "mutants.plugin", *hypothesis(), "-p", "no:cacheprovider"]
        options = ["-p", "pytest_cov.plugin", "--cov", f"--cov-config={main}", "--cov-context=test", "--cov-report="]
        options += ["--continue-on-collection-errors"]  # where a package is not there
        options += ["-p", "xdist.plugin", "-n", str(jobs), "--maxschedchunk=4"] if jobs > 1 else []
        until = {} if seconds is None else {"MUTANTS_UNTIL": str(time.time() + seconds)}
        environment = environment_of(
            settings,
            settings.root,
            MUTANTS_TIMES=str(times),
            MUTANTS_CHILDREN=str(children),
            MUTANTS_EACH=str(each),
            **until,
        )
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        environment["PYTHONPATH"] += os.pathsep + str(site)
        done = subprocess.run([*python, *options, *arguments], cwd=settings.root, env=environment, check=False)
        if done.returncode not in (0, 1) or not times.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and no map: run it by itself and mend what fails")
        found = _read(settings, data, json.loads(times.read_text()))
    if arguments:  # not every test: it must not pass for the map of the commit
        found.commit += " in part"
    found.write(settings.map)
    return found


def environment_of(settings: Settings, root: Path, **more: str) -> dict[str, str]:
    """The environment of a run of the tests in a tree: its own sources first, one thread."""
    paths = [str(root / "src"), str(root / "tests"), str(TOOL)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("MUTANTS_", "COVERAGE_", "PYTEST_"))}
    path = os.pathsep.join(dict.fromkeys(paths))
    return {**outer, **one_thread, **settings.environment, "PYTHONPATH": path, **more}


def hypothesis() -> tuple[str, ...]:
    """Its plugin, by name: others are not loaded, they take longer to import than a test to run."""
    return ("-p", "_hypothesis_pytestplugin") if find_spec("_hypothesis_pytestplugin") else ()


def _read(settings: Settings, data: Path, times: dict[str, float]) -> Map:
    from coverage import CoverageData

    tests = sorted(times.items(), key=lambda item: (item[1], item[0]))
    place = {name: i for i, (name, _) in enumerate(tests)}
    stored = CoverageData(str(data))
    stored.read()
    functions: dict[str, Function] = {}
    for file in settings.files():
        code = Code((settings.root / file).read_text())
        lines: dict[int, set[int]] = defaultdict(set)
        for line, contexts in stored.contexts_by_lineno(str(settings.root / file)).items():
            lines[line] = {place[name] for name in map(named_by, contexts) if name in place}
        for scope in code.scopes:
            functions[f"{file}::{scope}"] = Function(code.digest(scope))
        for statement in code.statements:
            if not statement.at_import and statement.scope:
                found = {t for line in range(statement.first, statement.last + 1) for t in lines.get(line, ())}
                offset = statement.first - code.scopes[statement.scope].lineno
                functions[f"{file}::{statement.scope}"].statements[offset] = sorted(found)
    return Map(settings.commit, tests, functions)


@cache
def named_by(context: str) -> str:
    """The test of a context: pytest-cov adds `|run`, the environment of a child has ` (call)`."""
    name = context.rsplit("|", 1)[0] if context.endswith(("|run", "|setup", "|teardown")) else context
    return name.rsplit(" (", 1)[0] if name.endswith((" (call)", " (setup)", " (teardown)")) else name
