from __future__ import annotations

import json

import pytest

import gradguess as gg
from gradguess.errors import InputError
from gradguess_lab import plan
from gradguess_lab.bench.cases import Case
from gradguess_lab.bench.registry import make_loop
from gradguess_lab.config import TrainConfig, differences
from gradguess_lab.methods import (
    METHODS,
    MethodEntry,
    guess_for,
)
from gradguess_lab.tables.runs import Run, command


def test_keys_are_unique_and_name_what_is_not_default():
    configs = [TrainConfig(), TrainConfig(k="rank"), TrainConfig(lr=3e-4), TrainConfig(device="cuda:0")]
    assert len({config.key for config in configs}) == len(configs)
    assert TrainConfig(method="wt", lr=3e-4, width=64).key == "wt-w64-s0-lr0.0003"


def test_round_trip_through_json():
    config = TrainConfig(k="25", tangents=2, lr=1)  # k as the command line hands it over
    assert (config.k, config.lr) == (25, 1.0)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "wprep", "Did you mean 'wperp'"),
        ("solver", "svg", "Did you mean 'svd'"),
        ("k", 0, "k must be at least 1"),
        ("k", "ranks", "k must be at least 1, or 'rank'"),
        ("epochs", 0, "epochs must be at least 1"),
        ("lr", float("nan"), "lr must be positive"),
        ("fraction", 1.5, "fraction must lie in"),
        ("width", 1.5, "width must be int"),
        ("tangents", 0, "tangents must be at least 1"),
        ("script", None, "script must be str, found None"),
        ("diagnose", [1], r"diagnose must be str, found \[1\]"),
        ("diagnose", "²", "diagnose: expected a number of epochs"),
        ("diagnose", "9" * 5000, "diagnose: expected a number of epochs"),
        ("k", "--5", "k must be at least 1, or 'rank'"),
        ("k", "²", "k must be at least 1, or 'rank'"),
        ("sites", "a\x00b", "sites must be text that can be printed"),
    ],
)
def test_bad_values_are_refused(field: str, value: object, message: str):
    with pytest.raises(InputError, match=message):
        TrainConfig(**{field: value})


def test_an_unknown_field_suggests_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'width'"):
        TrainConfig.from_dict({"widht": 3})


def test_differences_name_each_field():
    other = {**TrainConfig(lr=1e-3).as_dict(), "new": 1}
    found = differences(TrainConfig(), other)
    assert found == ["lr: 0.001 there, 0.0001 here", "new: 1 there, 'absent' here"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_builds_a_guess(method: str):
    assert guess_for(TrainConfig(method=method)) is not None


def test_a_method_takes_one_line(monkeypatch: pytest.MonkeyPatch):
    """The command line, the benchmark, the tables and the figures all learn of it from the registry."""
    entry = MethodEntry(
        "mine", "My own", "#123456", "#abcdef", "o", frozenset({"k"}), lambda config: gg.WPerp(config.k)
    )
    monkeypatch.setitem(METHODS, "mine", entry)
    config = TrainConfig(method="mine", k=3)
    assert guess_for(config) == gg.WPerp(3)
    assert make_loop("mine", Case(width=8, depth=2, batch=6, k=2)).forward.guess == gg.WPerp(2)
    run = Run("a", config.as_dict(), {})
    assert run.label == "My own, k = 3"
    assert command(run.config).startswith("gradguess train --data mnist1d --method mine")


def test_plans_share_runs():
    quick, full = plan.plan("quick"), plan.plan("paper")
    assert set(quick) == set(full) == set(plan.PAPER)
    assert {config.width for config in plan.unique(quick)} == {64, 128}
    assert {config.seed for config in plan.unique(full)} == set(range(10))
    assert all(config.epochs == 300 for config in plan.unique(full))
    wt = {config for runs in quick.values() for config in runs if (config.method, config.width) == ("wt", 128)}
    assert len(wt) == 1
    # a quick run is a run of the paper's preset too (but the stand-in for width 256), and asking for one
    # experiment alone does not make other runs of it
    at_papers_widths = {config for name in plan.PAPER if name != "preconditioning" for config in quick[name]}
    assert at_papers_widths <= set(plan.unique(full))
    alone = plan.plan("quick", ["choice-of-k"])["choice-of-k"]
    assert [config for config in alone if config in quick["choice-of-k"]] == quick["choice-of-k"]


def test_quick_leaves_out_what_takes_an_hour_unless_asked_for():
    assert not any(plan.is_heavy(config) for config in plan.unique(plan.plan("quick")))
    asked = plan.unique(plan.plan("quick", ["newton-schulz"]))
    assert "wperp-ns" in {config.method for config in asked}
    full = {(config.method, config.k) for config in plan.unique(plan.plan("paper"))}
    assert {("wperp-ns", 10), ("wperp", "rank")} <= full


def test_plans_take_another_solver_and_seeds():
    runs = plan.unique(plan.plan("quick", ["scaling"], seeds=2, solver="svd", device="cuda"))
    assert {config.solver for config in runs} == {"svd"}
    assert {config.seed for config in runs} == {0, 1}
    assert {config.device for config in runs} == {"cuda"}
    with pytest.raises(InputError, match="seeds must be at least 1"):
        plan.plan(seeds=0)
