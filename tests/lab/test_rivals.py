"""Rivals on the command line."""

from __future__ import annotations

import dataclasses

import pytest

import gradguess as gg
from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import METHODS
from gradguess_lab.train import train

RIVALS = {
    "dfa": gg.baselines.DFA(seed=3),
    "fdfa": gg.baselines.FDFA(),
    "mezo": gg.baselines.MeZO(),
    "local-linear": gg.baselines.LocalLinear(),
    "local-predsim": gg.baselines.PredSim(),
    "checkpointed": gg.baselines.Checkpointed(),
    "frozen": gg.baselines.Frozen(),
}


@pytest.mark.parametrize("name", RIVALS)
def test_the_command_line_knows_them(name, tmp_path):
    config = TrainConfig(
        method=name, width=8, depth=2, epochs=2, batch=50, samples=100, sites="2", eval_every=1, seed=3
    )
    assert METHODS[name].make(config) == RIVALS[name]
    whole = train(config, tmp_path / "whole")
    first = train(dataclasses.replace(config, epochs=1), tmp_path / "first")
    assert first["history"][0]["test_loss"] == whole["history"][0]["test_loss"]
    assert whole["history"][1]["test_loss"] != whole["history"][0]["test_loss"]
