"""Which tests run a line: measured once by coverage.py, kept by function so that it outlives shifted lines."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .code import Code
from .find import Mutant
from .settings import Settings

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
    tests: list[tuple[str, float]]
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

    def choose(self, covering: list[int], file: str, settings: Settings) -> list[tuple[str, float]]:
        """The fastest tests, the fastest of those that bear the module's name, as long as the time allows.

        Tests whose file is gone are left out: the map may be older than the tree.
        """
        covering = [t for t in covering if (settings.root / self.tests[t][0].split("::")[0]).exists()]
        fastest = covering[: settings.tests]
        mirrored = [t for t in covering[settings.tests :] if mirrors(self.tests[t][0], file)][: settings.mirrored]
        chosen: list[int] = []
        seconds = 0.0
        for test in sorted({*fastest, *mirrored}):
            seconds += self.tests[test][1]
            if chosen and seconds > settings.seconds:
                break
            chosen.append(test)
        return [self.tests[t] for t in chosen]

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


def measure(settings: Settings, arguments: list[str], jobs: int) -> Map:
    """Run the tests once under coverage.py, with a context for each, and write the map."""
    settings.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.build, prefix="coverage-") as folder:
        data, times = Path(folder) / "data", Path(folder) / "times.json"
        text = CONFIGURATION.format(data=data, source=settings.root / "src")
        main, children = Path(folder) / "main.cfg", Path(folder) / "children.cfg"
        main.write_text(text)
        children.write_text(text + CHILDREN)
        python = [sys.executable, "-m", "pytest", "-p", "mutants.plugin", "--cov", f"--cov-config={main}"]
        options = ["--cov-context=test", "--cov-report=", *(["-n", str(jobs)] if jobs > 1 else [])]
        environment = environment_of(settings.root, MUTANTS_TIMES=str(times), MUTANTS_CHILDREN=str(children))
        done = subprocess.run([*python, *options, *arguments], cwd=settings.root, env=environment, check=False)
        if done.returncode not in (0, 1) or not times.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and no map: run it by itself and mend what fails")
        found = _read(settings, data, json.loads(times.read_text()))
    if arguments:  # not every test: it must not pass for the map of the commit
        found.commit += " in part"
    found.write(settings.map)
    return found


def environment_of(root: Path, **more: str) -> dict[str, str]:
    """The environment of a run of the tests in a tree: its own sources first, one thread."""
    paths = [str(root / "src"), str(root / "tests"), str(TOOL)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("MUTANTS_", "COVERAGE_", "PYTEST_"))}
    return {**outer, **one_thread, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **more}


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


def named_by(context: str) -> str:
    """The test of a context: pytest-cov adds `|run`, the environment of a child has ` (call)`."""
    name = context.rsplit("|", 1)[0] if context.endswith(("|run", "|setup", "|teardown")) else context
    return name.rsplit(" (", 1)[0] if name.endswith((" (call)", " (setup)", " (teardown)")) else name
