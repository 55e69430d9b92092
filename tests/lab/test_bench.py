"""The benchmark: what it records, that its ratios are ratios, and that the report shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gradguess.errors import GradguessError, InputError
from gradguess_lab.bench import bench_memory, bench_time, memory
from gradguess_lab.bench.cases import Case, grid
from gradguess_lab.bench.memory import probe
from gradguess_lab.bench.registry import make_loop
from gradguess_lab.bench.run import growth, slopes
from gradguess_lab.bench.timing import ROUND, Times
from gradguess_lab.methods import METHODS, VARIANTS

TINY = Case(width=8, depth=2, batch=6, k=2)


def record(tmp_path: Path | None = None):
    cases = grid(width=[8, 12], depth=[2], batch=[6], k=[2])
    return bench_time(cases, ["wperp", "wperp-svd"], seconds=0.0, memory=False, out=tmp_path)


def test_the_record_holds_every_method_in_every_case_and_where_it_was_measured(tmp_path):
    found = record(tmp_path / "bench")
    assert found == json.loads((tmp_path / "bench" / "time-cpu.json").read_text())
    assert [(row["method"], row["width"]) for row in found["rows"]] == [
        (method, width) for width in (8, 12) for method in ("backprop", "wperp", "wperp-svd")
    ]
    wanted = {"step_ms", "quiet_ms", "refresh_ms", "ratio", "quiet_ratio", "rounds", "scaled_from", "peak_mb"}
    assert all(wanted <= set(row) and row["step_ms"] > 0 and row["ratio"] > 0 for row in found["rows"])
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
def test_memory_grows_with_depth_for_backprop_and_its_slope_is_fitted(tmp_path, monkeypatch):
    """Memory in a process of its own, with an exact allocator; the time, which is not looked at, in this one."""

    def measure(job, variables, apart=memory._in_a_process):
        return apart(job, variables) if variables else probe(job["method"], Case(**job["case"]), 1)

    monkeypatch.setattr(memory, "_in_a_process", measure)
    case = Case(width=64, depth=1, batch=2048, k=2)
    found = bench_memory([2, 24], case, ["backprop"], tmp_path)
    shallow, deep = (row["peak_mb"] - row["gradients_mb"] for row in found["rows"])
    assert deep > shallow + 9  # 22 layers of 2 × 0.5 MB
    assert found["growth"] == slopes(found["rows"])
    assert found["growth"][0]["mb_per_layer"] == pytest.approx((deep - shallow) / 22)
    assert json.loads((tmp_path / "memory-cpu.json").read_text()) == found


def test_exponents_are_fitted_over_one_axis_alone():
    case = {"method": "wt", "batch": 1, "k": 1, "dtype": "float32", "device": "cpu"}
    rows = [
        {**case, "width": w, "depth": d, "quiet_ms": w**2 if d == 1 else 3.0 * w} for w in (3, 6, 12) for d in (1, 3)
    ]
    assert growth(rows, "width") == [{"method": "wt", "axis": "width", "exponent": pytest.approx(2.0), "points": 3}]
    assert growth(rows, "depth")[0]["exponent"] == pytest.approx(0.0)
    assert growth(rows, "batch") == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"width": 0}, "width must be at least 1, found 0"), ({"dtype": "int8"}, "dtype: expected float32.*'int8'")],
)
def test_a_case_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        Case(**wrong)


def test_an_unknown_method_is_refused_before_anything_is_timed():
    with pytest.raises(InputError, match=r"unknown method 'wprep'\. Did you mean 'wperp'\?"):
        bench_time([TINY], ["wprep"], say=lambda words: pytest.fail("a case was begun"))


def test_a_damaged_benchmark_is_refused_by_name(tmp_path):
    from gradguess_lab.report.results import load_benchmarks

    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "time-cpu.json").write_text('{"schema": 1}')
    with pytest.raises(GradguessError, match=r"time-cpu.json: expected a benchmark of schema 1, found no 'kind'"):
        load_benchmarks(tmp_path)


def test_the_command_prints_one_json_object_last(tmp_path):
    testing = pytest.importorskip("typer.testing")
    from gradguess_lab.cli import app

    options = ["--width", "8", "--batch", "6", "--k", "2", "--method", "wt", "--seconds", "0", "--no-peaks"]
    result = testing.CliRunner().invoke(app, ["bench", *options, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [row["method"] for row in found["rows"]] == ["backprop", "wt"]
    assert (tmp_path / "time-cpu.json").exists()
