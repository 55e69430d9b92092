from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradguess.errors import InputError
from gradguess_lab import plans, store
from gradguess_lab.config import TrainConfig, differences
from gradguess_lab.methods import METHODS, guess_for, tried_by
from gradguess_lab.streams import plan as streams
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.tasks import used_in


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
        ("k", 0, "k must be at least 1"),
        ("lr", float("nan"), "lr must be positive"),
        ("warmup", 1.0, "warmup must lie in"),
        ("width", 1.5, "width must be int"),
        ("script", None, "script must be str, found None"),
        ("diagnose", "9" * 5000, "diagnose: expected a number of epochs"),
        ("sites", "a\x00b", "sites must be text that can be printed"),
    ],
)
def test_bad_values_are_refused(field: str, value: object, message: str):
    with pytest.raises(InputError, match=message):
        TrainConfig(**{field: value})


def test_differences_name_each_field():
    other = {**TrainConfig(lr=1e-3).as_dict(), "new": 1}
    del other["k"]  # of a version that did not know it: it stands at its default
    found = differences(TrainConfig(), other)
    assert found == ["lr: 0.001 there, 0.0001 here", "new: 1 there, 'absent' here"]
    assert differences(TrainConfig(k=3), other)[0] == "k: 10 there, 3 here"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_builds_a_guess(method: str):
    assert guess_for(TrainConfig(method=method)) is not None


def unique(*arguments, **options) -> dict[str, plans.Job]:
    return {job.key: job for job in plans.jobs(*arguments, **options)}


def test_plans_share_runs_and_quick_leaves_out_what_takes_an_hour_unless_asked_for():
    quick, full = plans.jobs("quick"), unique("paper")
    assert {job.experiment for job in quick} == set(plans.PAPER) - {"scripts", "preconditioning"}
    assert {(job.settings.width, job.settings.seed) for job in quick} == {(64, 0), (128, 0)}
    assert {job.settings.seed for job in full.values()} == set(range(10))
    assert not any(plans.is_heavy(job.settings) for job in quick)
    assert {("wperp-ns", 10), ("wperp", "rank")} <= {(job.settings.method, job.settings.k) for job in full.values()}
    # a quick run is a run of the paper's preset too, and asking for one experiment alone does not make other runs of it
    assert {job.key for job in quick} <= set(full)
    assert plans.jobs("quick", ["choice-of-k"]) == [job for job in quick if job.experiment == "choice-of-k"]
    assert "wperp-ns" in {job.settings.method for job in plans.jobs("quick", ["newton-schulz"])}
    assert [next(plan) for plan in plans.plans()] == [quick]
    assert len(plans.plans("quick", ["beyond", "streams"])) == 1 + len(streams.GROUPS["recall12"].entries)
    with pytest.raises(InputError, match="preconditioning: the preset 'quick' has no runs"):
        plans.jobs("quick", ["preconditioning"])
    changed = plans.jobs("quick", ["scaling"], seeds=2, solver="svd", device="cuda")
    found = {(job.settings.solver, job.settings.device, job.settings.seed) for job in changed}
    assert found == {("svd", "cuda", 0), ("svd", "cuda", 1)}


def test_jobs_know_their_task_and_their_variant():
    real = unique("paper", ["real"], seeds=1)
    assert len(real) == 8 * 10 * 3
    assert {job.task for job in real.values()} == set(used_in("real"))
    assert {job.variant for job in real.values()} == set(tried_by("real"))
    swept = {job.variant for job in plans.jobs("paper", ["feedback-residual"])}
    assert {"feedback-chained sweeps=2", "pieces-zero sweeps=4", "feedback-chained-bootstrap"} <= swept


@pytest.mark.parametrize("study", ["paper", "deep", "compare", "streams"])
def test_a_stored_row_is_found_under_the_key_of_its_settings(study: str):
    """A key that changed would have every run made again."""
    for row in store.read(Path(__file__).parents[2] / "results" / study):
        if config := row.get("config"):
            made = StreamConfig(**config) if "rule" in config else TrainConfig.from_dict(config)
            assert made.key == row["key"]
