"""Files that are whole or absent, and checkpoints, which are one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradguess.errors import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab.files import exclusive


def test_a_directory_has_one_owner_at_a_time(tmp_path: Path):
    directory = tmp_path / "a" / "run"
    refused = pytest.raises(GradguessError, match="run is in use by another process")
    with exclusive(directory), refused, exclusive(directory):
        pytest.fail("two owners")
    with exclusive(directory):  # it is free again
        pass


def test_a_checkpoint_is_one_file(tmp_path: Path):
    for epoch in (1, 2, 3):
        checkpoint.save(tmp_path, {"epoch": torch.tensor(epoch)}, {"rows": [{}] * epoch, "peak_mb": 0.0})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]
    assert checkpoint.load(tmp_path) == ({"epoch": torch.tensor(3)}, {"rows": [{}] * 3, "peak_mb": 0.0})
