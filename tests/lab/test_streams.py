"""Tasks on endless streams, runs on them, and sweeps of runs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from itertools import islice, pairwise

import pytest
import torch

from gradguess.errors import InputError
from gradguess_lab.files import write_json
from gradguess_lab.streams import plan
from gradguess_lab.streams.config import RULES, StreamConfig
from gradguess_lab.streams.run import run
from gradguess_lab.streams.sweep import best_rate, place, sweep, wanted
from gradguess_lab.streams.tasks import TASKS
from gradguess_lab.streams.tmaze import TMaze
from online_streams import Here

SMALL = StreamConfig(delay=2, k=3, width=6, streams=3, steps=12, truncation=3, refresh=5)


def moments(name: str, count: int, streams: int = 4, delay: int = 3, seed: int = 0):
    task = TASKS[name](streams, delay, torch.Generator().manual_seed(seed))
    return task, list(islice(task.moments, count))


@pytest.mark.parametrize("name", [name for name in TASKS if name != "characters"])
def test_a_task_gives_what_it_says_and_the_same_for_the_same_seed(name):
    task, found = moments(name, 20)
    _, again = moments(name, 20)
    for one, other in zip(found, again, strict=True):
        assert one.x.shape == (4, task.inputs)
        assert torch.equal(one.x, other.x)
        if one.target is not None:
            output = torch.zeros(4, task.outputs)
            assert task.losses(output, one.target).shape == (4,)
            assert math.isfinite(task.error(output, one.target))


def test_recall_asks_for_the_sign_of_some_steps_ago():
    _, found = moments("recall", 10, delay=3)
    for before, now in zip(found, found[3:], strict=False):
        assert torch.equal(before.x, now.target)
    assert set(torch.cat([moment.x for moment in found]).flatten().tolist()) == {-1.0, 1.0}


def test_copy_asks_for_the_symbols_in_order():
    task, found = moments("copy", 2 * 13, delay=3)
    for episode in (found[:13], found[13:]):
        assert episode[0].ended is not None
        assert all(moment.ended is None for moment in episode[1:])
        shown = [moment.x.argmax(1) for moment in episode[:5]]
        assert all(bool((moment.x.argmax(1) == 8).all()) and moment.target is None for moment in episode[5:8])
        assert all(torch.equal(moment.target, symbol) for moment, symbol in zip(episode[8:], shown, strict=True))
    assert task.chance == 7 / 8


@pytest.mark.parametrize("name", ["henon", "lorenz"])
def test_chaos_is_normalised_and_asks_for_the_next_value(name):
    _, found = moments(name, 3000, streams=32)
    assert all(torch.equal(now.target, later.x) for now, later in pairwise(found))
    values = torch.stack([moment.x for moment in found[500:]])
    assert abs(float(values.mean())) < 0.1
    assert abs(float(values.std()) - 1) < 0.1
    assert [i for i, moment in enumerate(found) if moment.ended is not None][:3] == [0, 200, 400]


def test_the_maze():
    maze = TMaze(2, 3, torch.Generator().manual_seed(0))
    assert torch.equal(maze.seen().argmax(1), maze.goal)
    goal = maze.goal.clone()
    for _ in range(3):
        reward, ended, _ = maze.act(torch.tensor([0, 0]))
        assert reward.tolist() == pytest.approx([-0.1, -0.1])
        assert not ended.any()
    assert maze.seen().argmax(1).tolist() == [3, 3]
    reward, ended, found = maze.act(torch.stack([goal[0] + 1, 2 - goal[1]]))
    assert reward.tolist() == pytest.approx([4.0, -0.4])
    assert ended.all()
    assert found.tolist() == [True, False]
    assert torch.equal(maze.seen().argmax(1), maze.goal)
    for _ in range(5):
        assert not maze.act(torch.tensor([1, 1]))[1].any()
    assert maze.act(torch.tensor([1, 1]))[1].all()  # time is up


@pytest.mark.parametrize("rule", RULES)
def test_a_run_of_every_rule(rule):
    record = run(dataclasses.replace(SMALL, rule=rule))
    assert json.loads(json.dumps(record, allow_nan=False))["failed"] == ""
    assert {"error", "step_ms", "memory_mb"} <= record.keys()
    assert record["error"] == run(dataclasses.replace(SMALL, rule=rule))["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "recal"}, "unknown task 'recal'. Did you mean 'recall'"),
        ({"rule": "bptt"}, "unknown rule"),
        ({"k": 0}, "k must be at least 1"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"stop": -1}, "must not be negative"),
    ],
)
def test_a_wrong_configuration(change, words):
    with pytest.raises(InputError, match=words):
        StreamConfig(**change)


def test_a_sweep_tunes_reports_and_repeats_nothing(tmp_path, monkeypatch):
    """The worker runs here, in place of a process."""
    entries = [SMALL, dataclasses.replace(SMALL, rule="one-step")]
    group, said = plan.Group(entries, grid=(1e-3, 1e-2), seeds=2), []
    assert [(config.seed, config.lr) for config in wanted(tmp_path, group)] == 2 * [(100, 1e-3), (100, 1e-2)]
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Here)
    assert sweep([group], tmp_path, 1, say=said.append) == {}
    assert 2 * (3 + 2) <= len(said) <= 2 * (4 + 2)
    rates = {entry: best_rate(tmp_path, group, entry) for entry in entries}
    assert set(rates.values()) <= {1e-3, 1e-2}
    for config in (c for entry in entries for c in group.reported(entry, rates[entry])):
        assert place(tmp_path, config).exists()
    said.clear()
    sweep([group], tmp_path, 1, say=said.append)
    assert said == []


@pytest.mark.parametrize("number", range(5))
def test_the_rate_is_the_one_whose_worse_seed_is_best(number, tmp_path):
    """And runs that cannot change it are not made. None: the run diverged."""
    group, source = plan.Group([SMALL], grid=(1e-3, 1e-2, 1e-1)), random.Random(number)
    errors = {config: source.choice([None, *(source.random() for _ in range(5))]) for config in group.tuning(SMALL)}
    made = []
    while best_rate(tmp_path, group, SMALL) is None:
        runs = list(wanted(tmp_path, group))
        assert runs
        assert not set(runs) & set(made)
        for config in runs:
            write_json(place(tmp_path, config), {"error": errors[config]})
        made += runs
    worst = {rate: max(_size(errors[c]) for c in errors if c.lr == rate) for rate in group.grid}
    chosen = best_rate(tmp_path, group, SMALL)
    assert worst[chosen] == min(worst.values())
    for config in set(errors) - set(made):
        assert max(_size(errors[c]) for c in made if c.lr == config.lr) >= worst[chosen]


def _size(error: float | None) -> float:
    return math.inf if error is None else error


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    bad = dataclasses.replace(SMALL, device="nonsense")
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Here)
    failures = sweep([plan.Group([bad, SMALL], grid=(), seeds=1)], tmp_path, 1, say=lambda text: None)
    assert list(failures) == [bad.key]
    assert "cannot be used" in next(iter(failures.values()))
    assert place(tmp_path, SMALL).exists()


def invoke(*arguments: str):
    testing = pytest.importorskip("typer.testing")
    pytest.importorskip("rich")
    from gradguess_lab.cli import app

    return testing.CliRunner().invoke(app, arguments)


def test_the_command_prints_one_json_object_last(tmp_path):
    small = ["--delay", "2", "--k", "3", "--width", "6", "--steps", "12", "--out", str(tmp_path / "record.json")]
    result = invoke("stream", "--task", "recall", "--rule", "wperp", *small, "--seed", "0", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert {"error", "step_ms", "memory_mb"} <= record.keys()
    whole = json.loads((tmp_path / "record.json").read_text())
    assert whole["error"] == record["error"]
    assert len(whole["curve"]) == 12
