"""The watch over a run, on histories that are made up, and at work."""

from __future__ import annotations

import math

import pytest

from gradguess.errors import NonFiniteError
from gradguess_lab.config import TrainConfig
from gradguess_lab.train import train
from gradguess_lab.watch import PATIENCE, Watch

CHANCE = math.log(10)


def said(losses: list[float], accuracies: dict[int, float] | None = None, **more: float) -> list[tuple[int, str]]:
    """The epochs at which something was said, and what."""
    watch = Watch(CHANCE, 0.1, "Try less.")
    found = []
    for epoch, loss in enumerate(losses, 1):
        row = {"epoch": epoch, "loss": loss, **more}
        if accuracies and epoch in accuracies:
            row["train_accuracy"] = accuracies[epoch]
        line = watch(row)
        if line:
            assert line.endswith(" Try less.")
            assert "\n" not in line
            found.append((epoch, line.partition(":")[0]))
    return found


def test_a_run_that_learns_is_left_in_peace():
    assert said([2.4, 2.2, 1.5, 0.9, 0.4], {1: 0.1, 3: 0.5, 5: 0.9}) == []
    assert said([2.4] * (PATIENCE - 1) + [2.2], {1: 0.1}) == []  # slow
    assert said([2.0, 1.9, 1.9], {1: 0.5, 3: 0.3}) == []  # worse, and far from chance
    assert said([2.2, 2.2, 2.2], {1: 0.15, 3: 0.1}) == []  # never much better than chance


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_named_once(bad: float):
    assert said([2.0, bad, bad]) == [(2, "diverged")]
    assert said([2.0], test_loss=bad) == [(1, "diverged")]


def test_a_collapse_is_named_once():
    assert said([2.0, 1.5, 2.3, 2.3, 2.3], {2: 0.4, 3: 0.101, 5: 0.1}) == [(3, "collapsed")]


def test_a_run_that_does_not_learn_is_named_after_a_while():
    assert said([2.31] * (PATIENCE + 5)) == [(PATIENCE, "not learning")]
    assert said([2.31] * (PATIENCE - 1) + [2.2] + [2.31] * (PATIENCE - 1)) == []


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
