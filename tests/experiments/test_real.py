from __future__ import annotations

import pytest

from gradguess.errors import GradguessError
from gradguess.experiments.config import TrainConfig
from gradguess.experiments.real import METHODS, TASKS, ablations, real


def test_every_task_runs_every_method_on_the_same_grid():
    runs = real(device="cpu")
    assert len({run.key for run in runs}) == len(runs) == len(TASKS) * len(METHODS) * 3 * 3
    assert all(TrainConfig.from_dict(run.as_dict()) == run for run in runs)


def test_a_part_of_it():
    runs = real(["cnn-mnist"], seeds=1, rates=[1e-3], epochs=2)
    assert [run.method for run in runs] == list(METHODS)
    assert {(run.data, run.model, run.epochs) for run in runs} == {("mnist", "cnn", 2)}
    assert {run.learn for run in ablations(["cnn-mnist"])} == {"never"}
    with pytest.raises(GradguessError, match="Did you mean 'cnn-mnist'"):
        real(["cnn-mist"])
