"""Tasks on endless streams, runs on them, and sweeps of runs."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import islice, pairwise

import pytest
import torch

from gradguess_lab.jobs import run_plans
from gradguess_lab.streams import plan
from gradguess_lab.streams.config import RULES, StreamConfig
from gradguess_lab.streams.run import run
from gradguess_lab.streams.tasks import TASKS, Corridors

SMALL = StreamConfig(delay=2, k=3, width=6, streams=3, steps=12, truncation=3, refresh=5)


def moments(name: str, count: int, streams: int = 4, delay: int = 3, seed: int = 0):
    return TASKS[name], list(islice(TASKS[name].moments(streams, delay, torch.Generator().manual_seed(seed)), count))


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("characters", "tmaze")])
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
    maze = Corridors(2, 3, torch.Generator().manual_seed(0))
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


def test_a_run_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    run(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_entry_is_tuned_and_then_reported(tmp_path):
    group = plan.Group([SMALL], grid=(1e-3, 1e-2), seeds=2)
    rows, failures = run_plans([group.plan("recall12", SMALL)], tmp_path)
    assert failures == {}
    errors = [row["error"] for row in rows if row["role"] == "reported"]
    assert [row["error"] for row in plan.reported(tmp_path, group, SMALL)] == errors
    assert {row["config"]["seed"] for row in rows if row["role"] == "tuning"} <= {100, 101}
    assert rows[0]["variant"] == "wperp k=3 basis=lagged"
