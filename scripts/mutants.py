"""Which small changes of the core no test notices: `make mutants SAMPLE=20 SEED=0`. The changes are cosmic-ray's.

Files are drawn by their size, then a place, then a change of that place: the same for one commit and seed. The last
commit is cloned into a temporary folder and changed there. For each change the golden values run first, then the tests
of the file's package, until one fails. A test that fails without the change too has killed nothing.
"""

import random
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter, defaultdict
from contextlib import chdir
from os import environ
from pathlib import Path
from subprocess import run

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome


def mutant(file: Path, draw: random.Random, session: Path):
    """One of the file's mutants. `int | None` is an annotation far more often than an operation: no mutants of `|`."""
    places = defaultdict(list)
    with use_db(session) as database:
        init([file], database, {})
        for item in database.work_items:
            (change,) = item.mutations
            if "BinaryOperator_BitOr" not in change.operator_name:
                places[change.start_pos].append(change)
    changes = places[draw.choice(sorted(places))] if places else []
    return draw.choice(sorted(changes, key=lambda c: (c.operator_name, c.occurrence))) if changes else None


def judged(change, limit: float) -> str:
    package = change.module_path.parts[2].removesuffix(".py")
    tests = ["tests/golden", *map(str, [*Path("tests").glob(package), *Path("tests").glob(f"test_{package}.py")])]
    command = f"{sys.executable} -m pytest -x -q -m 'not slow' {' '.join(tests)}"
    result = mutate_and_test([change], command, limit)
    verdict = "timed out" if result.output == "timeout" else result.test_outcome.value
    if verdict == "killed" and run_tests(f"{command} --lf", limit)[0] != TestOutcome.SURVIVED:
        verdict = "broken test"
    print(verdict, result.diff, sep="\n", flush=True)
    return verdict


parser = ArgumentParser(description=__doc__.splitlines()[0])
for name, default in {"sample": 20, "seed": 0, "limit": 600}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="seconds for the tests" * (name == "limit"))
options, found = parser.parse_args(), defaultdict(Counter)
with tempfile.TemporaryDirectory() as folder:
    run(["git", "clone", "--quiet", Path(__file__).parents[1], f"{folder}/tree"], check=True)
    environ.update(PYTHONPATH=f"{folder}/tree/src:{folder}/tree/lab", OMP_NUM_THREADS="1")
    with chdir(f"{folder}/tree"):
        files = sorted(path for path in Path("src/gradguess").rglob("*.py") if "integrations" not in path.parts)
        draw = random.Random(options.seed)
        for file in draw.choices(files, [path.stat().st_size for path in files], k=options.sample):
            if change := mutant(file, draw, Path(folder, "session.sqlite")):
                found[str(file)][judged(change, options.limit)] += 1
for file, counts in [*sorted(found.items()), ("all", sum(found.values(), Counter()))]:
    print(f"{file}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
