"""The rows of a study come back as they were stored; a write is whole, and what is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradguess.errors import GradguessError
from gradguess_lab import store


def row(key: str, **more: Any) -> dict[str, Any]:
    return {"schema": 1, "key": key, "metrics": {"loss": 0.1 + 0.2}, "history": [{"epoch": 1, "loss": 1 / 3}], **more}


def test_rows_come_back_and_equal_rows_give_equal_bytes(tmp_path: Path):
    rows = [row("a", text="–\u2028"), row("b", history=[])]
    for name in ("one", "two"):
        store.write(tmp_path / name, rows)
        assert store.read(tmp_path / name) == rows
    one, two = ([path.read_bytes() for path in store.files_of(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert store.read(tmp_path / "none") == []


def test_rows_are_merged_by_key(tmp_path: Path):
    store.write(tmp_path / "s", [row("a"), row("b")])
    store.merge(tmp_path / "s", [row("b", metrics={}), row("c")])
    assert store.read(tmp_path / "s") == [row("a"), row("b", metrics={}), row("c")]
    store.write(tmp_path / "s", [{"key": "a"}])  # its curves are gone, too
    assert store.read(tmp_path / "s") == [{"key": "a"}]


def test_what_lies_in_the_folder_counts_before_the_study_and_is_put_into_it(tmp_path: Path):
    study = tmp_path / "s"
    store.write(study, [row("run"), {"key": "time", "kind": "time", "schema": 1, "rows": [1]}])
    (study / "runs" / "run").mkdir(parents=True)
    (study / "time.json").write_text('{"kind": "time", "schema": 1, "rows": [2]}')
    (study / "failures.json").write_text('{"b": "no"}')
    (study / "runs" / "run" / "result.json").write_text(json.dumps(row("run", seed=1)))
    assert store.find(study, "time") == {"kind": "time", "schema": 1, "rows": [2]}
    assert store.find(study, "absent") is None
    assert [found.get("seed") for _, found in store.runs(study)] == [1, None]
    store.main(study)
    kept = {"key": "time", "kind": "time", "schema": 1, "rows": [2]}
    assert store.read(study) == [row("run", seed=1), kept]


@pytest.mark.parametrize(
    "cut", [lambda data: data[:-9], lambda data: b"text", lambda data: data[:20] + b"x" + data[21:]]
)
def test_a_damaged_file_is_named(tmp_path: Path, cut: Any):
    store.write(tmp_path / "s", [row("a")])
    path, _ = store.files_of(tmp_path / "s")
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(GradguessError, match=r"s\.jsonl\.gz"):
        store.read(tmp_path / "s")
