"""The tool on a toy project: one branch is covered, one is not."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("pytest_cov")

from mutants import page, record, verdicts
from mutants.__main__ import main
from mutants.code import Code
from mutants.covering import Map, named_by
from mutants.find import Mutant, all_mutants, mutants_of, sample
from mutants.record import Result
from mutants.run import Ended, Worker, outcome_of
from mutants.settings import Settings
from mutants.trees import make_trees, put, remove_trees

SOURCE = '''"""A toy."""

LIMIT = 3


def covered(x: int | None) -> int:
    """Not a place for a mutant: 1 + 1."""
    if x is None:
        raise ValueError("give a number, at most " + str(2 + 2))
    return x + LIMIT


def uncovered(x: int) -> int:
    return x - 5


def in_a_child(x: int) -> int:
    return x * 7
'''
TESTS = """import subprocess
import sys

import toy.signs
from toy.signs import covered


def test_covered():
    assert covered(1) == 4


def test_in_a_child():
    code = "from toy.signs import in_a_child; assert in_a_child(2) == 14"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
SETTINGS = """[tool.mutants]
sources = ["src/toy"]
leave_out = ["src/toy/left_out.py"]

[tool.pytest.ini_options]
addopts = "-q --import-mode=importlib"
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Settings:
    """A repository with a map of its tests and every mutant run once."""
    root = tmp_path_factory.mktemp("toy")
    files = {"src/toy/__init__.py": "", "src/toy/signs.py": SOURCE, "src/toy/left_out.py": "ONE = 1\n"}
    files |= {"tests/test_signs.py": TESTS, "pyproject.toml": SETTINGS, ".gitignore": "build/\n__pycache__/\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=toy", "-c", "user.email=toy@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "toy"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    assert main(["--root", str(root), "--jobs", "1", "map"]) == 0
    assert main(["--root", str(root), "run", "--sample", "100"]) == 0
    return Settings.read(root)


def outcomes(settings: Settings, function: str) -> dict[str, list[str]]:
    """The outcomes of the mutants of a function, by operator."""
    results = record.read(settings.results)
    found: dict[str, list[str]] = {}
    for mutant in all_mutants(settings):
        if mutant.function == function and (result := results.get((settings.commit, 0, mutant.name))):
            found.setdefault(mutant.operator.removeprefix("core/"), []).append(result.outcome)
    return found


def test_a_covered_line_is_killed_and_an_uncovered_one_survives(toy):
    assert outcomes(toy, "covered")["ReplaceBinaryOperator_Add_Sub"] == ["killed"]
    assert {o for group in outcomes(toy, "uncovered").values() for o in group} == {"survived"}


def test_a_line_that_only_a_child_process_runs_is_killed(toy):
    assert {o for group in outcomes(toy, "in_a_child").values() for o in group} == {"killed"}


def test_a_constant_is_tested_by_the_functions_that_mention_it(toy):
    assert outcomes(toy, "")["NumberReplacer"] == ["killed"]


@pytest.fixture
def worker(tmp_path):
    """In an empty tree."""
    made = Worker(Settings(tmp_path, ()), tmp_path)
    yield made
    made.end()


def test_what_takes_too_long_is_ended_with_all_that_it_started(worker):
    beats = worker.tree / "beats"
    child = f"import time\nwhile True:\n    open({str(beats)!r}, 'a').write('.')\n    time.sleep(0.05)"
    text = f"import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, '-c', {child!r}])\n"
    (worker.tree / "test_a.py").write_text(text)
    ended = worker.run_tests(["test_a.py::test_it"], limit=5.0)
    assert (ended.code, ended.failed, ended.last) == (None, [], "test_a.py::test_it")
    time.sleep(0.2)
    before = beats.read_text()
    time.sleep(1.0)
    assert beats.read_text() == before


def test_a_worker_serves_again_and_sees_another_source(worker):
    (worker.tree / "tests").mkdir()
    (worker.tree / "tests/test_a.py").write_text("from a import ONE\ndef test_one(): assert ONE == 1\n")
    found = []
    for text in ("ONE = 1\n", "ONE = 2\n", "ONE = 1\n"):
        put(worker.tree, "tests/a.py", text)
        found.append(worker.run_tests(["tests/test_a.py::test_one"], limit=30.0))
    assert [ended.code for ended in found] == [0, 1, 0]
    assert found[1].failed == ["tests/test_a.py::test_one"]


def test_hypothesis_does_not_shrink_against_a_mutant(worker):
    seen = worker.tree / "seen"
    text = f"""from hypothesis import given, settings, strategies
@settings(database=None, derandomize=True)
@given(strategies.integers())
def test_it(x):
    with open({str(seen)!r}, "a") as file: file.write(".")
    assert x < 10
"""
    (worker.tree / "test_a.py").write_text(text)
    assert worker.run_tests(["test_a.py::test_it"], limit=60.0).code == 1
    assert len(seen.read_text()) < 20


@pytest.mark.parametrize(
    ("code", "failed", "can_import", "outcome"),
    [
        (None, [], True, "timed out"),
        (0, [], True, "survived"),
        (1, ["a.py::test"], True, "killed"),
        (2, [], True, "killed"),  # a test file calls the mutant while it is collected
        (2, [], False, "incompetent"),
        (-11, [], True, "killed"),
    ],
)
def test_outcomes(code, failed, can_import, outcome):
    assert outcome_of(Ended(code, failed, 1.0), lambda: can_import) == outcome


def test_the_last_line_counts(toy, capsys):
    main(["--root", str(toy.root), "run", "--sample", "100"])
    lines = capsys.readouterr().out.splitlines()
    results = record.read(toy.results).values()
    killed = sum(r.outcome == "killed" for r in results)
    assert lines[-1] == f"killed {killed} of {len(results)}"
    assert lines[-3].split()[0] == "toy"
    assert "uncovered" in toy.page.read_text()


def test_the_working_tree_is_as_it_was(toy):
    assert subprocess.run(["git", "status", "--short"], cwd=toy.root, capture_output=True).stdout == b""
    assert list((toy.build / "trees").glob("*")) == []


def test_resuming_repeats_nothing(toy, capsys):
    before = toy.results.read_bytes()
    main(["--root", str(toy.root), "run", "--sample", "100"])
    assert ", 0 to run" in capsys.readouterr().out
    assert toy.results.read_bytes() == before


def test_resuming_after_a_cut_line_repeats_that_one_alone(toy, tmp_path, capsys):
    lines = toy.results.read_text().splitlines(keepends=True)
    lines.sort(key=lambda line: json.loads(line)["outcome"] != "survived")  # one without tests: it takes no time
    try:
        toy.results.write_text("".join(lines[1:]) + lines[0][:30])
        main(["--root", str(toy.root), "run", "--sample", "100"])
        assert ", 1 to run" in capsys.readouterr().out
        assert set(record.read(toy.results)) == {Result(**json.loads(line)).key for line in lines}
    finally:
        toy.results.write_text("".join(lines))


def test_a_run_that_is_killed_goes_on(toy):
    """SIGKILL after the first result: what had ended is not run again, and the source is whole."""
    kept = toy.results.read_text()
    toy.results.unlink()
    command = [sys.executable, "-m", "mutants", "--root", str(toy.root), "--jobs", "1", "run", "--sample", "3"]
    try:
        with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.readline()
            process.kill()
        ended = len(record.read(toy.results))
        assert 1 <= ended < 3
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
        assert f", {3 - ended} to run" in done.stdout
        assert len(toy.results.read_text().splitlines()) == 3
        assert (toy.root / "src/toy/signs.py").read_text() == SOURCE
    finally:
        toy.results.write_text(kept)


def test_the_sample_is_reproducible_and_nested(toy):
    mutants = all_mutants(toy)
    assert sample(mutants, 5, seed=0) == sample(mutants[::-1], 5, seed=0) == sample(mutants, 8, seed=0)[:5]
    assert sample(mutants, 5, seed=0) != sample(mutants, 5, seed=1)


def test_a_place_is_drawn_once(toy):
    places = [(m.file, m.number, m.column) for m in sample(all_mutants(toy), 100, seed=0)]
    assert len(places) == len(set(places))


def test_a_shifted_line_leaves_the_sample_as_it_was():
    one = sample(list(mutants_of("a.py", SOURCE)), 4, seed=0)
    other = sample(list(mutants_of("a.py", "# a line more\n\n" + SOURCE)), 4, seed=0)
    assert [m.name for m in one] == [m.name for m in other]
    assert [m.number + 2 for m in one] == [m.number for m in other]


def test_files_that_are_left_out_have_no_mutants(toy):
    assert {m.file for m in all_mutants(toy)} == {"src/toy/signs.py"}


@pytest.mark.parametrize(
    "line",
    [
        "def f(x: int | None = None) -> int | str: return g(x)",
        "def f(x, *, y): return g(x, y)",
        "x: int | None = None",
        '__all__ = ["a"] + ["b"]',
        "Number = int | float",
        "_Number = int | float",
        'def f(): raise ValueError("α" + str(1))',
        'def f(): warnings.warn("at most" + str(1))',
        'def f():\n    """1 + 1"""',
        'if __name__ == "__main__":\n    main(1)',
    ],
)
def test_places_without_worth_are_left_out(line):
    assert list(mutants_of("a.py", line + "\n")) == []


def test_defaults_are_mutated_though_annotations_are_not():
    found = [m.column for m in mutants_of("a.py", "def f(α: int | None = 1, β: int = 2): return g(α, β)\n")]
    assert found == [22, 22, 34, 34]


VERDICT = {"file": "a.py", "function": "uncovered", "line": "return x - 5", "operator": "core/NumberReplacer"}


def test_a_verdict_survives_a_line_shift(tmp_path):
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps([{**VERDICT, "nth": 1, "verdict": "equivalent", "why": "nobody calls it"}]))
    said = verdicts.read(path)
    for text in (SOURCE, "# a line more\n" + SOURCE):
        found = [m for m in mutants_of("a.py", text) if m.key in said]
        assert [(m.function, m.nth) for m in found] == [("uncovered", 1)]


@pytest.mark.parametrize(
    ("entry", "message"), [({"verdict": "fine"}, "must be one of"), ({"verdict": "equivalent"}, "has no reason")]
)
def test_a_verdict_without_sense_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        verdicts.Verdict(**VERDICT, **entry)


def judged(outcome: str, verdict: str | None) -> page.Judged:
    mutant = Mutant("src/toy/signs.py", "f", "x", "core/AddNot", 0, 1, 0, 0)
    said = verdicts.Verdict(*mutant.key[:4], verdict, "because") if verdict else None
    return mutant, Result("c", 0, mutant.name, outcome, "x", "not x"), said


@pytest.mark.parametrize(
    ("outcome", "verdict", "column"),
    [
        ("timed out", None, "timed out"),
        ("timed out", "gap", "timed out"),
        ("timed out", "loops", "killed"),
        ("survived", "equivalent", "equivalent"),
        ("survived", "gap", "survived"),
        ("survived", "loops", "survived"),
        ("killed", "equivalent", "killed"),
        ("incompetent", None, "incompetent"),
    ],
)
def test_standing(outcome, verdict, column):
    assert page.standing(*judged(outcome, verdict)[1:]) == column


def test_time_outs_count_and_equivalent_ones_do_not(toy):
    entries = [("killed", None), ("timed out", None), ("timed out", "loops"), ("survived", "equivalent")]
    lines = page.table([judged(*entry) for entry in [*entries, ("incompetent", None)]], toy)
    assert lines[-1] == "killed 2 of 3"
    assert lines[-2].split() == ["all", "2", "0", "1", "1", "1"]


def test_a_killed_mutant_shows_that_its_verdict_is_wrong(toy):
    text = page.survivors([judged("killed", "equivalent"), judged("survived", None)], [], toy)
    assert "## Wrong verdict" in text
    assert '"verdict": ""' in text  # an entry to copy


def test_a_map_outlives_a_shifted_and_a_changed_function(toy):
    known = Map.read(toy.map)
    mutant = next(m for m in all_mutants(toy) if m.line == "return x + LIMIT")
    expected = known.covering(Code(SOURCE), mutant)
    assert [known.tests[t][0] for t in expected] == ["tests/test_signs.py::test_covered"]
    shifted = Code("# a line more\n" + SOURCE)
    assert known.covering(shifted, replace(mutant, number=mutant.number + 1)) == expected
    changed = Code(SOURCE.replace("    return x + LIMIT", "    x = x + 0\n    return x + LIMIT"))
    assert known.covering(changed, replace(mutant, number=mutant.number + 1)) == expected


def test_a_new_module_has_the_tests_that_bear_its_name(toy):
    known = Map.read(toy.map)
    mutant = replace(next(iter(mutants_of("src/toy/signs.py", SOURCE))), file="src/toy/more/signs.py")
    assert len(known.covering(Code(SOURCE), mutant)) == len(known.tests) == 2


def test_a_short_map_keeps_the_fastest(toy, tmp_path):
    known = Map.read(toy.map)
    known.shortened(1).write(tmp_path / "map.json.gz")
    short = Map.read(tmp_path / "map.json.gz")
    assert {test for test, _ in short.tests} <= {test for test, _ in known.tests}
    for name, function in known.functions.items():
        for at, tests in function.statements.items():
            kept = [short.tests[t] for t in short.functions[name].statements[at]]
            assert kept == [known.tests[t] for t in tests][:1]


@pytest.mark.parametrize("context", ["a.py::test[x|y]|run", "a.py::test[x|y] (call)", "a.py::test[x|y]|setup"])
def test_contexts_name_tests(context):
    assert named_by(context) == "a.py::test[x|y]"


def test_trees_of_ended_processes_are_removed(toy):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old = toy.build / "trees" / str(ended.pid)
    old.mkdir(parents=True)
    make_trees(toy, 1)
    remove_trees(toy)
    assert not old.exists()
