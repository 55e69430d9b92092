"""Files that are whole or absent, and checkpoints that are replaced while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradguess.errors import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab.files import exclusive, read_json, write_atomic, write_json

STATE = {"metrics": {"bytes": 0, "digest": ""}, "peak_mb": 0.0}


def save(directory: Path, epoch: int) -> None:
    checkpoint.save(directory, {"epoch": torch.tensor(epoch)}, STATE, epoch)


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


def test_a_reader_takes_the_newer_checkpoint_when_its_tensors_are_gone(tmp_path: Path, monkeypatch):
    """The run saves epoch 2 after the reader has seen the index of epoch 1, and before it reads the tensors."""
    save(tmp_path, 1)
    read = checkpoint._tensors
    seen: list[int] = []

    def late(directory: Path, index: dict[str, Any]) -> dict[str, torch.Tensor]:
        seen.append(index["epoch"])
        if len(seen) == 1:
            save(directory, 2)
        return read(directory, index)

    monkeypatch.setattr(checkpoint, "_tensors", late)
    stored = checkpoint.load(tmp_path)
    assert stored is not None
    assert stored[0]["epoch"].item() == stored[1]["epoch"] == 2
    assert seen == [1, 2]


def test_a_checkpoint_leaves_one_pair_of_files(tmp_path: Path):
    for epoch in (1, 2, 3):
        save(tmp_path, epoch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3.safetensors", "checkpoint.json"]
