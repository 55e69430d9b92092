"""The watch over a run, on histories that are made up, and at work."""

from __future__ import annotations

import math

import pytest

from gradguess.errors import NonFiniteError
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import train
from gradguess_lab.watch import PATIENCE, Watch

CHANCE = math.log(10)


@pytest.mark.parametrize(
    ("losses", "accuracies", "expected"),
    [
        ([2.4, 2.2, 1.5, 0.9, 0.4], {1: 0.1, 3: 0.5, 5: 0.9}, []),  # learns
        ([2.4] * (PATIENCE - 1) + [2.2], {1: 0.1}, []),  # slow
        ([2.0, 1.9, 1.9], {1: 0.5, 3: 0.3}, []),  # worse, and far from chance
        ([2.2, 2.2, 2.2], {1: 0.15, 3: 0.1}, []),  # never much better than chance
        ([2.31] * (PATIENCE - 1) + [2.2] + [2.31] * (PATIENCE - 1), {}, []),
        ([2.0, math.nan, math.nan], {}, [(2, "diverged")]),
        ([2.0, math.inf], {}, [(2, "diverged")]),
        ([2.0, 1.5, 2.3, 2.3, 2.3], {2: 0.4, 3: 0.101, 5: 0.1}, [(3, "collapsed")]),
        ([2.31] * (PATIENCE + 5), {}, [(PATIENCE, "not learning")]),
    ],
)
def test_what_goes_wrong_is_named_once(
    losses: list[float], accuracies: dict[int, float], expected: list[tuple[int, str]]
):
    watch, found = Watch(CHANCE, 0.1, "Try less."), []
    for epoch, loss in enumerate(losses, 1):
        known = {"train_accuracy": accuracies[epoch]} if epoch in accuracies else {}
        if line := watch({"epoch": epoch, "loss": loss, **known}):
            found.append((epoch, line.partition(":")[0]))
    assert found == expected


def test_a_run_that_diverges_is_named_and_still_an_error(small: TrainConfig):
    heard: list[str] = []
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        train(TrainConfig(**(small.as_dict() | {"lr": 1e20})), say=heard.append)
    assert len(heard) == 1
    assert heard[0].startswith("diverged: ")
    assert "a smaller --lr (it is 1e+20)" in heard[0]


def test_listening_changes_no_result(small: TrainConfig):
    def metrics(**options) -> dict[str, float]:
        found = train(small, **options)["metrics"]
        return {name: value for name, value in found.items() if "loss" in name or "accuracy" in name}

    heard: list[str] = []
    assert metrics(say=heard.append) == metrics()
    assert heard == []
