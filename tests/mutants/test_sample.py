"""A fixed small sample of mutants, each held against one test that kills it: what CI runs of `make mutants`."""

import shutil
from pathlib import Path

import pytest

from mutants.run import Worker
from mutants.settings import Settings
from mutants.trees import put

ROOT = Path(__file__).parents[2]
GOLDEN = "tests/golden/test_golden.py::test_golden"
MUTANTS = [  # a file, what stands in it once, what takes its place, a test that fails
    (
        "src/gradguess/linalg/subspaces.py",
        "top > rtol**2 * top[0]",
        "top > rtol**2 / top[0]",
        "tests/linalg/test_subspaces.py::test_directions_beyond_the_rank_are_zero[3-6-30-20]",
    ),
    (
        "src/gradguess/layers/norms.py",
        "(running_var + eps).rsqrt()",
        "(running_var - eps).rsqrt()",
        "tests/layers/test_tangents.py::test_as_pytorch_does[batch_norm, at rest]",
    ),
    (
        "src/gradguess/passes/relu_chain.py",
        "if t is None or y is None:\n            self.t",
        "if t is None and y is None:\n            self.t",
        f"{GOLDEN}[sites/chain/branch/wt]",
    ),
    (
        "src/gradguess/step/split.py",
        "(self.rows.stop - self.rows.start) / self.total",
        "(self.rows.stop + self.rows.start) / self.total",
        f"{GOLDEN}[chunk/chain/16/part]",
    ),
    (
        "src/gradguess/step/measure.py",
        "sites_below**0.5",
        "sites_below*0.5",
        f"{GOLDEN}[balance/chain/subspace]",
    ),
    (
        "src/gradguess/step/refresh.py",
        "search.count % guess.refresh == 0 and not missing_only",
        "search.count % guess.refresh == 0 or not missing_only",
        f"{GOLDEN}[zoo-steps/tied/shared]",
    ),
]


@pytest.fixture
def worker(tmp_path):
    """In a copy of the sources and tests, with what Python has compiled of them."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path / name)
    made = Worker(Settings.read(ROOT), tmp_path)
    yield made
    made.end()


def test_a_fixed_sample_is_killed(worker):
    """And lives without the mutants: a test that fails anyway kills nothing."""
    tests = [test for *_, test in MUTANTS]
    assert worker.run_tests(tests, limit=120.0).code == 0
    survivors = []
    for file, before, after, test in MUTANTS:
        text = (ROOT / file).read_text()
        assert text.count(before) == 1, f"{file} no longer has {before!r}: take another mutant"
        put(worker.tree, file, text.replace(before, after))
        ended = worker.run_tests([test], limit=120.0)
        put(worker.tree, file, text)
        if ended.failed != [test]:
            survivors.append((file, after, ended))
    assert not survivors
