"""Results are found wherever they lie; a damaged one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradguess.errors import GradguessError
from gradguess_lab.tables.runs import load_runs
from report.synthetic import record, write


def test_folders_and_lines_are_both_read(tmp_path: Path):
    write(tmp_path, [record("wt", key="a")])
    lines = [json.dumps(record("wt", seed=s, key=f"line {s}")) for s in range(2)]
    (tmp_path / "sweep.jsonl").write_text("\n".join(lines) + "\n\n")
    assert [run["key"] for run in load_runs(tmp_path)] == ["a", "line 0", "line 1"]


def test_a_runs_own_file_counts_before_a_collection(tmp_path: Path):
    write(tmp_path, [record("wt", key="a", width=64)])
    (tmp_path / "a-collection.jsonl").write_text(json.dumps(record("wt", key="a", width=128)) + "\n")
    assert [run["width"] for run in load_runs(tmp_path)] == [64]


def damaged(**changes: Any) -> str:
    return json.dumps({**record(), **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(record())[:200], "truncated or not JSON"),
        (damaged(schema=2), "expected schema 1, found 2"),
        (damaged(config={}), "expected a method in 'config'"),
        (damaged(metrics={"train_accuracy": "high"}), "expected a number under 'train_accuracy'"),
        (damaged(diagnostics=[{"epoch": 1, "sites": {"0": {"overlap": 3}}}]), "a list of numbers under 'overlap'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str, message: str):
    path = tmp_path / "run" / "result.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(GradguessError, match=message) as caught:
        load_runs(tmp_path)
    assert str(path) in str(caught.value)


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path):
    (tmp_path / "sweep.jsonl").write_text(json.dumps(record()) + "\n" + json.dumps(record(seed=1))[:90])
    with pytest.raises(GradguessError, match=r"sweep\.jsonl, line 2 is truncated"):
        load_runs(tmp_path)
