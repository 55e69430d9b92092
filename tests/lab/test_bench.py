"""The benchmark: what it records, that its ratios are ratios, and that the report shows it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from gradguess.compile import compiler
from gradguess.errors import GradguessError
from gradguess_lab import environment
from gradguess_lab.bench import run
from gradguess_lab.bench.loops import ROUND, Times, make_loop
from gradguess_lab.bench.run import EXACT, Case, bench, grid, growth, run_apart
from gradguess_lab.config import TrainConfig
from gradguess_lab.datasets import DATASETS
from gradguess_lab.methods import METHODS, VARIANTS
from gradguess_lab.tasks import TASKS, used_in
from traced_graphs import as_compiled

pytest.importorskip("mnist1d")
TINY = TrainConfig(width=8, depth=2, batch=6, k=2)
SMALL = TrainConfig(model="residual", data="mnist1d", width=8, depth=2, batch=16)


@pytest.fixture
def here(monkeypatch):
    """What needs no exact allocator is measured in this process."""

    def measure(case, name, variables, *arguments):
        alone = name == "peaks"
        return run_apart(case, name, variables, *arguments) if alone else getattr(case, name)()

    monkeypatch.setattr(run, "run_apart", measure)


def test_the_record_holds_every_method_in_every_case_and_where_it_was_measured(tmp_path, here):
    cases = grid(width=[8, 12], depth=[2], batch=[6], k=[2])
    found = bench("time", cases, ["wperp", "wperp-svd"], seconds=0.0, out=tmp_path / "bench")
    assert found == json.loads((tmp_path / "bench" / "time-cpu.json").read_text())
    assert [(row["method"], row["width"]) for row in found["rows"]] == [
        (method, width) for width in (8, 12) for method in ("backprop", "wperp", "wperp-svd")
    ]
    wanted = {"step_ms", "quiet_ms", "refresh_ms", "ratio", "quiet_ratio", "rounds", "scaled_from", "peak_mb"}
    assert all(wanted <= set(row) and row["step_ms"] > 0 and row["ratio"] > 0 for row in found["rows"])
    assert [row["scaled_from"] for row in found["rows"][:3]] == [None, None, 2]
    assert {"torch", "threads", "load_before", "load_after"} <= set(found["environment"])
    assert {(fit["method"], fit["axis"], fit["points"]) for fit in found["growth"]} == {
        (method, "width", 2) for method in ("backprop", "wperp", "wperp-svd")
    }


def test_a_step_carries_its_share_of_the_refreshes():
    times = Times(plain=[1.0, 1.0, 5.0], refreshing=[3.0], between=20)
    assert times.refresh == ROUND * 2.0
    assert times.step == pytest.approx(1.0 + ROUND * 2.0 / 20)
    assert times.ratio(Times(plain=[0.5, 0.5, 2.5])) == pytest.approx(2.0 + ROUND * 2.0 / 20 / 0.5)


def test_ratios_are_paired():
    """A machine that is ten times slower in one round slows down both sides of the ratio."""
    assert Times(plain=[2.0, 20.0, 2.0]).ratio(Times(plain=[1.0, 10.0, 1.0])) == 2.0


@pytest.mark.parametrize("name", [*METHODS, *VARIANTS])
def test_every_method_steps(name):
    loop = make_loop(name, TINY)
    before = [p.detach().clone() for p in loop.model.parameters()]
    assert math.isfinite(float(loop.step()))
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


@pytest.mark.slow
def test_memory_grows_with_depth_for_backprop_and_its_slope_is_fitted(tmp_path, here):
    cases = grid(width=[64], depth=[2, 24], batch=[2048], k=[2])
    found = bench("memory", cases, ["backprop"], memory=True, out=tmp_path)
    shallow, deep = (row["peak_mb"] - row["gradients_mb"] for row in found["rows"])
    assert deep > shallow + 9  # 22 layers of 2 × 0.5 MB
    assert found["growth"] == growth("memory", found["rows"])
    assert found["growth"][0]["mb_per_layer"] == pytest.approx((deep - shallow) / 22)
    assert json.loads((tmp_path / "memory-cpu.json").read_text()) == found


def test_starts_are_measured_twice_with_one_cache(tmp_path, monkeypatch):
    caches = []

    def start(case, name, variables, *arguments):
        caches.append(variables["TORCHINDUCTOR_CACHE_DIR"])
        return [{"task": case.name, "case": case.config.key, "method": case.methods[0], "start_s": len(caches)}]

    monkeypatch.setattr(run, "run_apart", start)
    found = bench("starts", {"small": SMALL}, ["backprop", "wt"])
    assert [(row["first_s"], row["second_s"]) for row in found["rows"]] == [(1, 2), (3, 4)]
    assert caches[0] == caches[1] != caches[2] == caches[3]


def test_exponents_are_fitted_over_one_axis_alone():
    case = {"method": "wt", "batch": 1, "k": 1, "dtype": "float32", "device": "cpu"}
    rows = [
        {**case, "width": w, "depth": d, "quiet_ms": w**2 if d == 1 else 3.0 * w} for w in (3, 6, 12) for d in (1, 3)
    ]
    assert growth("time", rows) == [
        {"method": "wt", "axis": "width", "exponent": pytest.approx(2.0), "points": 3},
        {"method": "wt", "axis": "depth", "exponent": pytest.approx(0.0), "points": 2},
    ]


@pytest.mark.parametrize("method", ["backprop", "wperp", "wperp-leaf", "wperp-pieces", "feedback-chained-rare"])
@pytest.mark.parametrize("name", [*used_in("large-cuda"), *used_in("large-cpu")])
def test_large_networks_step_at_a_tiny_size(name, method):
    config = TASKS[name].config
    data = "shakespeare" if DATASETS[config.data].kind == "text" else "digits"
    loop = make_loop(method, dataclasses.replace(config, data=data, width=16, depth=2, batch=8, k=2))
    assert loop.x.shape[0] == 8
    assert all(math.isfinite(float(loop.step())) for _ in range(2))


@pytest.fixture
def graphs_alone(monkeypatch):
    """Nothing is compiled in this process: graphs run as they are."""
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("method", ["backprop", "wperp", "feedback-chained-rare"])
def test_compiled_loops_make_the_same_steps(method, graphs_alone):
    case = dataclasses.replace(SMALL, dtype="float64")
    found = []
    for is_compiled in (False, True):
        loop = make_loop(method, case, is_compiled)
        loop.first_rounds()
        found.append(list(loop.model.parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_peak_memory_of_each_loop_in_a_process():
    """Recomputing keeps less than backpropagation, and MeZO least of all."""
    task = TrainConfig(model="mlp", data="mnist1d", width=64, depth=24, batch=2048)
    case = Case("compiled", "deep", task, ["backprop", "checkpoint-sqrt", "mezo"], ["eager"])
    plain, again, mezo = run_apart(case, "peaks", EXACT)
    assert 12 < plain < 16  # 24 layers of 0.5 MB, and the gradients
    assert again < 0.7 * plain
    assert mezo < 0.3 * plain


@pytest.mark.slow
def test_processes_take_turns_and_one_that_fails_is_named(tmp_path: Path):
    cases = {"broken": dataclasses.replace(SMALL, data="shakespeare"), "small": SMALL, "other": SMALL}
    with pytest.raises(GradguessError, match=r"^measuring broken failed: .*does not read data of kind 'text'"):
        bench("tasks", cases, ["wt"], seconds=0.0, jobs=2, out=tmp_path)
    found = json.loads((tmp_path / "tasks-cpu.json").read_text())  # what did not fail
    names = [(task, method) for task in ("small", "other") for method in ("backprop", "wt")]
    assert [(row["task"], row["method"]) for row in found["rows"]] == names
    assert {"commit", "clean", "torch", "threads"} <= set(found["environment"])


def test_what_is_measured_is_not_measured_again(tmp_path: Path, monkeypatch):
    cases = {"mlp-mnist1d": SMALL, "mlp-mnist": dataclasses.replace(SMALL, depth=1)}
    timed: list[str] = []

    def quicker(left, together):
        timed.extend(case.name for case in left)
        yield from ((one, [{"task": one.name, "method": one.methods[0], "case": one.config.key}]) for one in left)

    monkeypatch.setattr(run, "in_turns", quicker)
    bench("tasks", {"mlp-mnist": cases["mlp-mnist"]}, out=tmp_path)
    found = bench("tasks", cases, out=tmp_path)
    assert [row["task"] for row in found["rows"]] == ["mlp-mnist1d", "mlp-mnist"]
    assert bench("tasks", cases, out=tmp_path)["rows"] == found["rows"]
    assert timed == ["mlp-mnist", "mlp-mnist1d"]
    bench("tasks", cases, seconds=1.0, out=tmp_path)  # other settings
    assert timed[2:] == ["mlp-mnist1d", "mlp-mnist"]
    wider = {"mlp-mnist": dataclasses.replace(SMALL, width=9)}  # another network of the same name
    assert len(bench("tasks", wider, seconds=1.0, out=tmp_path)["rows"]) == 2
    assert timed[4:] == ["mlp-mnist"]
    other = environment.describe("cpu") | {"commit": "another"}
    monkeypatch.setattr(environment, "describe", lambda device: dict(other))
    bench("tasks", {"mlp-mnist1d": SMALL}, seconds=1.0, out=tmp_path)  # other code
    assert timed[5:] == ["mlp-mnist1d"]
