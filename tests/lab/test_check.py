"""`reproduce --check`: a row is current while the present code makes the first steps that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradguess_lab.check import check
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import first_losses, train

TINY = {"method": "wperp", "width": 16, "epochs": 1, "samples": 96, "batch": 32, "eval_every": 1}


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return train(TrainConfig(**TINY))


def name_of(row: dict[str, Any]) -> str:
    (name,) = (name for name, found in check([row]).items() if found)
    return name


def test_a_run_of_the_present_code_is_current(row: dict[str, Any]):
    assert len(row["first"]) == 3
    assert row["first"] == first_losses(TrainConfig(**TINY))
    assert name_of(row) == "current"


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 1e-2}, {"method": "weight"}])
def test_a_run_of_other_data_steps_or_estimates_is_stale(row: dict[str, Any], change: dict[str, Any]):
    other = {**row, "config": {**row["config"], **change}}
    assert name_of(other) == "stale"
    assert name_of({**other, "seen": {"commit": "0" * 40}}) == "seen"


def test_what_cannot_be_checked_here_is_named(row: dict[str, Any]):
    assert name_of({**row, "first": []}) == "unknown"
    if not torch.cuda.is_available():
        assert name_of({**row, "config": {**row["config"], "device": "cuda"}}) == "elsewhere"
    assert "epochs must be at least 1" in str(check([{**row, "config": {"method": "wperp", "epochs": -1}}])["stale"])
