"""Results and the code that made them: a change of the golden record makes the results of its method stale."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradguess.errors import GradguessError
from gradguess_lab.check import GOLDEN, check, parts_of, read_golden
from gradguess_lab.tables.runs import Run

CASES = {
    "zoo/relu-bias/ns-placed": 5.0,
    "own/chain/wt": 1.0,
    "own/chain/shared": 2.0,
    "zoo/relu-bias/ns": 3.0,
    "own/residual/chained": 6.0,
    "pieces/chain/chained": 7.0,
    "pieces/chain/wt": 8.0,
    "run/chain/chained-part/plain": 4.0,
    "run/chain/chained/events": 9.0,
}


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def record_golden(root: Path, **changed: float) -> None:
    cases = {name: value + changed.get(name, changed.get(name.split("/")[2], 0.0)) for name, value in CASES.items()}
    about = {"labels": {name: ["a norm", "a projection"] for name in cases}, "tolerances": {}}
    values = [number for value in cases.values() for number in (value, value / 7)]
    path = root / GOLDEN
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, values=np.array(values), about=np.frombuffer(json.dumps(about).encode(), np.uint8))


def commit(root: Path, words: str) -> str:
    (root / "code.py").write_text(words)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", words)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    record_golden(tmp_path)
    return tmp_path


def result(key: str, method: str, commit: str | None, clean: bool = True, **config: Any) -> Run:
    environment = {"commit": commit, "clean": None if commit is None else clean}
    return Run(key, {"method": method, **config}, {}, environment=environment)


def test_a_commit_that_changes_no_estimate_makes_nothing_stale(root: Path):
    first = commit(root, "first")
    commit(root, "second")
    found = check([result("a", "wt", first), result("b", "wperp", first, solver="shared")], root)
    assert found.current == ["a", "b"]
    assert not found.stale


def test_only_the_methods_whose_record_changed_are_stale(root: Path):
    first = commit(root, "first")
    record_golden(root, shared=1e-3)
    second = commit(root, "second")
    results = [
        result("old shared", "wperp", first, solver="shared"),
        result("new shared", "wperp", second, solver="shared"),
        result("old wt", "wt", first),
        result("old subspace", "wperp", first, solver="subspace"),
    ]
    found = check(results, root)
    assert found.stale == {"old shared": f"{first[:10]}: own/chain/shared"}
    assert found.current == ["new shared", "old wt", "old subspace"]


def test_variations_of_a_method_count_for_it(root: Path):
    first = commit(root, "first")
    record_golden(root, **{"chained-part": 1.0})
    commit(root, "second")
    found = check([result("a", "feedback-chained", first), result("b", "feedback-direct", first)], root)
    assert list(found.stale) == ["a"]
    assert found.current == ["b"]


@pytest.mark.parametrize(
    ("case", "stale"),
    [
        ("own/residual/chained", ["residual", "mlp in pieces"]),
        ("pieces/chain/chained", ["residual", "mlp in pieces"]),
        ("run/chain/chained/events", ["residual", "mlp in pieces"]),
        ("run/chain/chained-part/plain", ["mlp", "residual", "mlp in pieces"]),
    ],
)
def test_an_mlp_is_held_to_the_cases_of_chains(root: Path, case: str, stale: list[str]):
    first = commit(root, "first")
    record_golden(root, **{case: 1.0})
    commit(root, "second")
    networks = {"mlp": {"model": "mlp"}, "residual": {"model": "residual"}, "mlp in pieces": {"sites": 3}}
    results = [result(name, "feedback-chained", first, **config) for name, config in networks.items()]
    assert list(check(results, root).stale) == stale


def test_a_record_that_is_not_committed_yet_counts(root: Path):
    first = commit(root, "first")
    commit(root, "second")
    record_golden(root, wt=1.0)
    assert list(check([result("a", "wt", first)], root).stale) == ["a"]


def test_rounding_is_no_change(root: Path):
    first = commit(root, "first")
    record_golden(root, wt=1e-13)
    commit(root, "second")
    assert check([result("a", "wt", first)], root).current == ["a"]


def test_what_cannot_be_told_is_said(root: Path):
    first = commit(root, "first")
    found = check([result("a", "wt", None), result("b", "wt", "f" * 40), result("c", "wt", first, clean=False)], root)
    assert found.without_commit == ["a"]
    assert found.not_comparable == {"b": "commit ffffffffff is not in this repository"}
    assert found.unclean == ["c"]
    said = "\n".join(found.lines())
    assert "have no commit" in said
    assert "in no commit" in said


def test_without_a_repository_it_says_what_to_do(tmp_path: Path):
    with pytest.raises(GradguessError, match="in a clone of gradguess"):
        check([], tmp_path)


def test_every_method_has_cases_in_the_record():
    from gradguess_lab.methods import METHODS

    words = {
        part for case in read_golden((Path(__file__).parents[2] / GOLDEN).read_bytes()) for part in case.split("/")
    }
    for method in METHODS:
        assert parts_of({"method": method}) & words, method
    for solver in ("svd", "subspace", "shared"):
        assert parts_of({"method": "wperp", "solver": solver}) & words


def test_the_command_exits_with_1_if_a_result_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    testing = pytest.importorskip("typer.testing")
    from gradguess_lab import check as module
    from gradguess_lab import cli

    stored = {"schema": 1, "key": "a", "config": {"method": "wt"}, "metrics": {}, "environment": {}}
    (tmp_path / "results.jsonl").write_text(json.dumps(stored) + "\n")
    for stale, code in (({}, 0), ({"a": "b"}, 1)):
        monkeypatch.setattr(module, "check", lambda runs, package, stale=stale: module.Verdicts(stale=stale))
        done = testing.CliRunner().invoke(cli.app, ["reproduce", "--check", "--out", str(tmp_path)])
        assert done.exit_code == code, done.output


def test_what_must_be_run_again_is_written_for_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    testing = pytest.importorskip("typer.testing")
    from gradguess_lab import check as module
    from gradguess_lab import cli
    from gradguess_lab.reproduce import read_configs

    stored = [
        {
            "schema": 1,
            "key": key,
            "config": {"method": "wt", "seed": seed},
            "metrics": {"seconds": s},
            "environment": {},
        }
        for seed, (key, s) in enumerate({"stale": 9.0, "fine": 1.0, "nobody knows": 2.0}.items())
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in stored))
    verdicts = module.Verdicts(stale={"stale": ""}, without_commit=["nobody knows"], current=["fine"])
    monkeypatch.setattr(module, "check", lambda runs, package: verdicts)
    again = tmp_path / "again.json"
    words = ["reproduce", "--check", "--out", str(tmp_path), "--dump", str(again)]
    assert testing.CliRunner().invoke(cli.app, words).exit_code == 1
    assert [config.seed for config in read_configs(again)["again"]] == [2, 0]  # the shortest first
