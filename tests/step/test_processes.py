"""Several processes that share a batch: the estimate does not depend on their number. gloo, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

import gradguess as gg
from processes_worker import BOUNDS, SCENARIOS, run

WORKER = Path(__file__).parents[1] / "support" / "processes_worker.py"
PATH = os.pathsep.join([str(WORKER.parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """What every rank of worlds of 2 and 4 processes saw. The processes that run these tests share it."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "worlds"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            directory.mkdir()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
            subprocess.run([sys.executable, str(WORKER), str(directory)], env=environment, timeout=300, check=True)
    return {s: [torch.load(directory / f"{s}-{r}.pt", weights_only=True) for r in range(s)] for s in BOUNDS}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same without other processes."""
    return {name: run(name, slice(0, 5)) for name in SCENARIOS}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_estimate_does_not_depend_on_the_number_of_processes(worlds, alone, name, size):
    wanted = alone[name]["grads"]
    for rank in worlds[size]:
        found = rank["runs"][name]["grads"]
        assert len(found) == len(wanted)
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_hold_the_same_state(worlds, name):
    first, *others = [rank["runs"][name]["state"] for rank in worlds[4]]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_weight_perturbation_sends_one_number(worlds):
    for rank in worlds[2]:
        assert rank["runs"]["weight/mlp"]["sent"] == 8  # one float64, as the model is
        assert rank["runs"]["weight/tangents"]["sent"] == 16


def test_other_guesses_send_the_gradient(worlds):
    run = worlds[2][1]["runs"]["activation/mlp"]
    size = sum(g.nbytes for g in run["grads"]) // 3
    assert run["sent"] == size + 8  # and whether it is finite


@pytest.mark.parametrize("method", ["weight", "shared", "direct"])
def test_nan_in_one_rank_is_everybodys(worlds, method):
    first, second = (rank["faults"] for rank in worlds[2])
    assert "Another process met" in first[method]
    assert "1 sample(s)" in second[method]
    assert first[f"{method}/skipped"] == second[f"{method}/skipped"] == 1
    assert first[f"{method}/grad"] is None


def test_the_wrapper_of_ddp_is_refused(monkeypatch):
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", nn.Linear)
    with pytest.raises(gg.InputError, match=r"model\.module"):
        gg.ForwardGradient(nn.Linear(3, 2), gg.WPerp())


def test_a_group_needs_torch_distributed():
    with pytest.raises(gg.InputError, match=r"init_process_group"):
        gg.ForwardGradient(nn.Linear(3, 2), gg.WPerp(), group="all")


@pytest.mark.parametrize("place", [(-1, 5), (3, 5), (0, 2)])
def test_a_place_must_fit(place):
    forward = gg.ForwardGradient(nn.Linear(3, 2), gg.WPerp())
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(gg.InputError, match=r"place: expected"):
        forward(loss_fn, torch.randn(4, 3), torch.zeros(4, dtype=torch.long), place=place)
