"""Files that are whole or absent, and checkpoints, which are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradguess.errors import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab.files import exclusive, read_json, write_atomic, write_json


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [([], dict, "a JSON object, found list"), ({}, list, "a JSON list, found dict")],
)
def test_what_a_file_should_hold_is_said(tmp_path: Path, value: Any, expected: type, message: str):
    write_json(tmp_path / "file.json", value)
    with pytest.raises(GradguessError, match=rf"the plan .*file\.json must hold {message}"):
        read_json(tmp_path / "file.json", "the plan", expected)
    assert read_json(tmp_path / "file.json", "the plan", type(value)) == value


def test_a_directory_has_one_owner_at_a_time(tmp_path: Path):
    directory = tmp_path / "a" / "run"
    refused = pytest.raises(GradguessError, match="run is in use by another process")
    with exclusive(directory), refused, exclusive(directory):
        pytest.fail("two owners")
    with exclusive(directory):  # it is free again
        pass


def test_other_errors_of_the_system_name_the_file(tmp_path: Path):
    with pytest.raises(GradguessError, match=r"absent/file: No such file"):
        write_atomic(tmp_path / "absent" / "file", "text")
    with pytest.raises(GradguessError, match=r"absent: No such file"):
        read_json(tmp_path / "absent", "the plan")


def test_a_checkpoint_is_one_file(tmp_path: Path):
    for epoch in (1, 2, 3):
        checkpoint.save(tmp_path, {"epoch": torch.tensor(epoch)}, {"rows": [{}] * epoch, "peak_mb": 0.0})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]
    assert checkpoint.load(tmp_path) == ({"epoch": torch.tensor(3)}, {"rows": [{}] * 3, "peak_mb": 0.0})


def test_a_checkpoint_of_two_files_says_how_to_go_on(tmp_path: Path):
    write_json(tmp_path / "checkpoint.json", {"tensors": "checkpoint-3.safetensors"})
    with pytest.raises(GradguessError, match=r"gradguess 0\.2, as two files\. Finish the run with that version, or"):
        checkpoint.load(tmp_path)
