"""`gradguess compare`: what is run, which rate is chosen, what a kill costs, and what is shown."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradguess as gg
from gradguess.errors import GradguessError, InputError
from gradguess_lab import train as training
from gradguess_lab.compare import contenders, measure, plan, run, tables, tasks
from gradguess_lab.compare.contenders import CONTENDERS
from gradguess_lab.compare.plan import Comparison, best
from gradguess_lab.compare.run import compare
from gradguess_lab.compare.tasks import TASKS
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import read_json, write_json
from gradguess_lab.methods import METHODS, VARIANTS
from gradguess_lab.recipes import RECIPES
from gradguess_lab.report import write_comparison
from gradguess_lab.run_many import run_directory

SMALL = Comparison(["mlp-mnist1d"], ["frozen"], epochs=4, seeds=2, grid=(1e-3, 1e-2), width=8, samples=200)


@pytest.fixture
def untimed(monkeypatch):
    """No step is timed: that takes a process of its own."""

    def costs(name: str, task: Any, methods: Any, seconds: float, out: Path, say: Any) -> dict[str, Any]:
        return {method: {"ratio": 1.0 + i, "step_ms": 2.0, "peak_mb": 4.0 + i} for i, method in enumerate(methods)}

    monkeypatch.setattr(run, "costs", costs)


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The keys of the runs that were trained, in order."""
    keys: list[str] = []
    real = training.train

    def train(config: Any, out: Any) -> Any:
        keys.append(config.key)
        return real(config, out)

    monkeypatch.setattr(training, "train", train)
    return keys


# --- the plan ------------------------------------------------------------------------------------------------------


def test_ten_methods_and_four_tasks_at_least():
    assert len([entry for entry in CONTENDERS.values() if not entry.control]) >= 10
    assert {"pieces-zero", "frozen"} <= {name for name, entry in CONTENDERS.items() if entry.control}
    assert {"mlp-mnist1d", "cnn-fashion-mnist", "residual-mnist1d", "charformer-shakespeare"} <= TASKS.keys()
    assert len(Comparison().entries) == len(TASKS) * len(CONTENDERS)


def test_every_method_and_every_recipe_is_there():
    assert all(name in METHODS or name in VARIANTS for name in CONTENDERS)
    assert RECIPES.keys() <= TASKS.keys()
    assert dataclasses.replace(TASKS["resnet18-cifar10"].config, rate=0.3, eval_every=5) == RECIPES["resnet18-cifar10"]


def test_a_method_that_works_in_pieces_is_cut_as_the_task_says():
    chosen = Comparison(["residual-mnist1d"], ["checkpointed", "dfa"])
    assert chosen.config(("residual-mnist1d", "checkpointed")).sites == "6"
    assert chosen.config(("residual-mnist1d", "dfa")).sites == "auto"
    assert chosen.config(("residual-mnist1d", "dfa")).method == "dfa"


def test_backpropagation_is_always_there_and_first():
    assert Comparison(["mlp-mnist1d"], ["dfa", "dfa"]).entries == [("mlp-mnist1d", "backprop"), ("mlp-mnist1d", "dfa")]


def test_runs_that_tune_are_short_and_have_another_seed():
    entry = ("mlp-mnist1d", "frozen")
    tuning, reported = SMALL.tuning(entry), SMALL.reported(entry, 1e-2)
    assert [(c.lr, c.seed, c.epochs) for c in tuning] == [(1e-3, 100, 1), (1e-2, 100, 1)]
    assert [(c.lr, c.seed, c.epochs) for c in reported] == [(1e-2, 0, 4), (1e-2, 1, 4)]
    assert {(c.width, c.samples, c.schedule) for c in (*tuning, *reported)} == {(8, 200, "cosine")}
    assert dataclasses.replace(SMALL, grid=(3e-3,)).tuning(entry) == []
    assert [c.lr for c in dataclasses.replace(SMALL, grid=()).tuning(entry)] == list(TASKS["mlp-mnist1d"].grid)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ["mlp-mnist"]}, "unknown task 'mlp-mnist'. Did you mean 'mlp-mnist1d'"),
        ({"methods": ["dfaa"]}, "unknown method 'dfaa'. Did you mean 'dfa'"),
        ({"seeds": 0}, "seeds: expected a whole number of at least 1"),
        ({"epochs": -1}, "epochs: expected a whole number of at least 0"),
        ({"grid": (1e-3, -1.0)}, "grid: expected positive learning rates"),
    ],
)
def test_what_cannot_be_run_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changed)


# --- the choice ----------------------------------------------------------------------------------------------------


def test_the_best_rate():
    assert best({1e-3: 0.5, 1e-2: 0.7, 1e-1: math.nan}, less=False) == 1e-2
    assert best({1e-3: 0.5, 1e-2: 0.7}, less=True) == 1e-3
    assert best({1e-2: 0.7, 1e-3: 0.7}, less=False) == 1e-3  # the smaller one of two that are equal
    assert best({1e-2: math.inf}, less=True) is None
    assert best({}, less=True) is None


def store(out: Path, config: Any, **metrics: float) -> None:
    directory = run_directory(out, config)
    directory.mkdir(parents=True)
    write_json(directory / "result.json", {"key": config.key, "config": config.as_dict(), "metrics": metrics})


@pytest.mark.parametrize(("task", "wanted"), [("mlp-mnist1d", 1e-2), ("charformer-shakespeare", 1e-3)])
def test_a_text_is_judged_by_bits_of_which_fewer_are_better(task, wanted, tmp_path):
    chosen, entry = dataclasses.replace(SMALL, tasks=[task]), (task, "frozen")
    for config, score in zip(chosen.tuning(entry), (2.0, 3.0), strict=True):
        store(tmp_path, config, test_accuracy=score, test_bits=score)
    assert chosen.best_rate(tmp_path, entry) == wanted


def test_a_rate_whose_run_did_not_end_is_not_chosen(tmp_path):
    entry = ("mlp-mnist1d", "frozen")
    assert SMALL.best_rate(tmp_path, entry) is None
    store(tmp_path, SMALL.tuning(entry)[0], test_accuracy=0.1)
    assert SMALL.best_rate(tmp_path, entry) == 1e-3
    assert dataclasses.replace(SMALL, grid=(0.5,)).best_rate(tmp_path, entry) == 0.5


# --- running -------------------------------------------------------------------------------------------------------


def test_a_comparison_is_made_once(tmp_path, untimed, trained):
    record = compare(SMALL, tmp_path)
    assert len(trained) == len(set(trained)) == 2 * (2 + 2)
    (task,) = record["tasks"]
    assert [row["method"] for row in task["rows"]] == ["backprop", "frozen"]
    for row in task["rows"]:
        assert len(row["test"]) == len(row["train"]) == 2
        assert row["lr"] in SMALL.grid
        assert [rate for rate, _ in row["scores"]] == list(SMALL.grid)
    assert task["rows"][0]["cosine"] == pytest.approx(1.0)
    assert task["rows"][1]["cosine"] is None  # nothing reaches the parameters below the lowest cut
    assert task["rows"][1]["memory_ratio"] == 5 / 4
    assert read_json(tmp_path / "compare.json", "comparison") == json.loads(json.dumps(record))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 8
    assert compare(SMALL, tmp_path) == record
    assert len(trained) == 8  # nothing was run again


def test_another_seed_or_method_adds_its_runs_alone(tmp_path, untimed, trained):
    compare(SMALL, tmp_path)
    trained.clear()
    compare(dataclasses.replace(SMALL, seeds=3), tmp_path)
    assert len(trained) == 2
    assert all("-s2-" in key for key in trained)


def test_tasks_that_were_compared_before_stay(tmp_path, untimed, trained):
    first = compare(SMALL, tmp_path)["tasks"]
    other = dataclasses.replace(SMALL, tasks=["residual-mnist1d"], methods=["backprop"], grid=(1e-3,), seeds=1)
    (mlp, residual) = compare(other, tmp_path)["tasks"]
    assert [mlp] == first
    assert residual["name"] == "residual-mnist1d"
    (mlp, again) = compare(dataclasses.replace(SMALL, seeds=1), tmp_path)["tasks"]
    assert again == residual
    assert [len(row["test"]) for row in mlp["rows"]] == [1, 1]  # a task that is compared again is replaced


def test_what_is_no_comparison_is_refused_before_all_the_work(tmp_path, untimed, trained):
    write_json(tmp_path / "compare.json", {"kind": "comparison", "schema": 1})
    with pytest.raises(GradguessError, match="in another directory"):
        compare(SMALL, tmp_path)
    assert not trained


def test_an_interrupted_comparison_goes_on(tmp_path, untimed, trained, monkeypatch):
    real = training.train

    def stops(config: Any, out: Any) -> Any:
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(config, out)

    monkeypatch.setattr(training, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        compare(SMALL, tmp_path)
    assert not (tmp_path / "compare.json").exists()
    done = list(trained)
    monkeypatch.setattr(training, "train", real)
    compare(SMALL, tmp_path)
    assert len(done) == 3
    assert len(trained) == len(set(trained)) == 8


def test_a_killed_comparison_goes_on(tmp_path, untimed, trained):
    words = ["compare", "--tasks", "mlp-mnist1d", "--methods", "frozen", "--epochs", "4", "--seeds", "2", "--jobs", "1"]
    words += ["--grid", "1e-3,1e-2", "--width", "8", "--samples", "200", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "gradguess", *words], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (first := list(tmp_path.glob("runs/*/result.json"))) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert first
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    record = compare(SMALL, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert not {path.parent.name for path in finished} & set(trained)
    assert [len(row["test"]) for row in record["tasks"][0]["rows"]] == [2, 2]


def test_a_run_that_diverges_is_said_and_not_tried_again(tmp_path, untimed, trained):
    chosen = dataclasses.replace(SMALL, methods=[], grid=(1e30,), seeds=1)
    chosen = dataclasses.replace(chosen, methods=["backprop"])
    record = compare(chosen, tmp_path)
    row = record["tasks"][0]["rows"][0]
    assert row["test"] == []
    assert row["diverged"] == 1
    assert "NaN or infinite" in row["failed"]
    assert len(trained) == 1
    assert compare(chosen, tmp_path) == record
    assert len(trained) == 1


def test_a_method_that_refuses_a_task_says_why(tmp_path, untimed, monkeypatch):
    text = tasks.Task("Text", TrainConfig(data="shakespeare", model="charformer", depth=2, batch=100), 2)
    for module in (plan, run):
        monkeypatch.setitem(module.TASKS, "text", text)
    chosen = Comparison(["text"], ["local-predsim"], epochs=1, seeds=1, grid=(1e-3,), width=4, samples=100)
    record = compare(chosen, tmp_path)
    rows = {row["method"]: row for row in record["tasks"][0]["rows"]}
    assert record["tasks"][0]["quantity"] == "bits"
    assert rows["backprop"]["test"][0] > 1
    assert rows["local-predsim"]["failed"].startswith("PredSim compares the classes of samples")
    (one,) = tables.compared(record)
    assert one.table.rows[1][0].note.startswith("PredSim compares the classes of samples")


# --- what is measured ----------------------------------------------------------------------------------------------


def test_costs_are_measured_in_one_process_and_once(tmp_path, monkeypatch):
    asked = []

    def in_turns(jobs: Any, together: int, say: Any) -> Any:
        for name, job in jobs.items():
            asked.append(job)
            names = ("backprop", *(method for method in job.methods if method != "backprop"))
            yield name, [{"method": m, "ratio": 1.5, "step_ms": 2.0, "peak_mb": 3.0, "mode": "eager"} for m in names]

    monkeypatch.setattr(measure, "in_turns", in_turns)
    own = {
        "backprop": {"sites": "auto", "method": "backprop"},
        "checkpointed": {"sites": "4", "method": "checkpointed"},
    }
    for _ in range(2):
        found = measure.costs("mlp-mnist1d", SMALL.task("mlp-mnist1d"), own, 0.1, tmp_path, lambda words: None)
    assert found["checkpointed"] == {"ratio": 1.5, "step_ms": 2.0, "peak_mb": 3.0}
    (job,) = asked
    assert job.memory
    assert list(job.methods) == list(own)
    loops = job.loops()
    assert loops["checkpointed", "eager"].forward.plan.method == gg.baselines.Checkpointed()
    assert loops["checkpointed", "eager"].forward.plan.sites == 4
    measure.costs("mlp-mnist1d", SMALL.task("mlp-mnist1d"), own, 0.2, tmp_path, lambda words: None)
    assert len(asked) == 2  # other settings


def test_timing_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "in_turns", lambda jobs, together, say: ((name, "out of memory") for name in jobs))
    with pytest.raises(GradguessError, match="timing mlp-mnist1d failed: out of memory"):
        measure.costs("mlp-mnist1d", SMALL.task("mlp-mnist1d"), {"backprop": {}}, 0.1, tmp_path, lambda words: None)


def test_the_cosine_is_with_what_the_method_has_learned(tmp_path, small):
    """The heads of a local loss are those of the checkpoint; against the same by hand."""
    config = dataclasses.replace(small, method="local-linear", sites="3", seed=3, samples=100, batch=100, lr=0.01)
    training.train(config, tmp_path)
    found = measure.cosine(config, 3, tmp_path)
    stored = measure.checkpoint.by_part(measure.checkpoint.load(tmp_path)[0])
    data = measure.load(config.data).first(100)
    model = training.build_model(config, data)
    model.load_state_dict(stored["model"])
    gradients = []
    for outputs in (head(model, stored["forward"], data.x_train), model(data.x_train)):
        loss = torch.nn.functional.cross_entropy(outputs, data.y_train)
        gradients.append(torch.autograd.grad(loss, model[0].weight)[0].flatten())
    ours, true = gradients
    assert found == pytest.approx(float(ours @ true / ours.norm() / true.norm()), rel=1e-5)
    assert 0 < found < 0.999
    assert measure.cosine(config, 3, tmp_path / "nowhere") is None


def head(model: torch.nn.Sequential, forward: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.relu(model[0](x)) @ forward["learned/0/W"].t() + forward["learned/0/b"]


# --- what is shown -------------------------------------------------------------------------------------------------


def row(method: str, test: list[float], **more: Any) -> dict[str, Any]:
    known = {"sends": "nothing", "control": False, "lr": 1e-3, "scores": [], "train": test, "diverged": 0, "failed": ""}
    return {"method": method, "test": test, **known, **more}


@pytest.fixture
def record() -> dict[str, Any]:
    made = run._record(SMALL, {}, {})
    made["tasks"][0]["rows"] = [
        row("backprop", [0.6, 0.62], sends="all", ratio=1.0, memory_ratio=1.0, cosine=1.0),
        row("dfa", [0.5, 0.54], ratio=0.9, memory_ratio=0.8, cosine=0.2),
        row("frozen", [0.3, 0.3], control=True, ratio=0.5, memory_ratio=0.4, cosine=None, diverged=1),
        row("local-predsim", [], lr=None, failed="PredSim needs classes. Use another."),
    ]
    return made


def test_the_table(record):
    (one,) = tables.compared(record)
    shown = [[cell.text for cell in line] for line in one.table.rows]
    assert shown[1] == [
        "DFA",
        "0.001",
        "0.520 ± 0.028",
        "0.520 ± 0.028",
        "−0.090",
        "0.90",
        "0.80",
        "0.20",
        "nothing",
        "2",
    ]
    assert shown[0][4] == "–"
    assert one.table.rows[2][0].text == "Lower part frozen (control)"
    assert one.table.rows[2][9].note == "1 diverged"
    assert shown[3][1:9] == ["–", "–", "–", "–", "–", "–", "–", "nothing"]
    assert one.table.rows[3][0].note == "PredSim needs classes"
    assert "Width 8, depth 3, 4 epochs, 200 samples, batches of 128" in one.table.caption
    assert "out of 0.001, 0.01, chosen by the test set after 1 epochs with another seed" in one.table.caption


def test_the_figures(record):
    (one,) = tables.compared(record)
    time_figure, memory = one.figures
    assert [curve.x for curve in time_figure.curves] == [[1.0], [0.9], [0.5]]
    assert [curve.x for curve in memory.curves] == [[1.0], [0.8], [0.4]]
    assert [curve.dashed for curve in memory.curves] == [False, False, True]
    assert memory.curves[1].low[0] == pytest.approx(0.52 - 0.0283, abs=1e-4)
    record["tasks"][0]["rows"] = [row("dfa", [])]
    assert tables.compared(record)[0].figures == ()


def test_the_page(record, tmp_path):
    write_json(tmp_path / "compare.json", record)
    page = write_comparison(tmp_path).read_text(encoding="utf-8")
    assert "<title>gradguess: methods compared</title>" in page
    assert "MLP on MNIST-1D" in page
    assert "Lower part frozen (control)" in page
    assert page.count("<figure") == 2
    assert "The paper" not in page
    assert (tmp_path / "report" / "tables" / "compare-mlp-mnist1d.csv").read_text().startswith("Method,Rate")


def test_the_command_report_makes_the_page_again(record, tmp_path):
    from typer.testing import CliRunner

    from gradguess_lab.cli import app

    write_json(tmp_path / "compare.json", record)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.stdout.strip() == str(tmp_path / "report" / "compare.html")
    assert (tmp_path / "report" / "compare.html").exists()


def test_a_file_that_is_no_comparison_is_refused(tmp_path):
    write_json(tmp_path / "compare.json", {"kind": "time"})
    with pytest.raises(GradguessError, match="expected a comparison of schema 2"):
        write_comparison(tmp_path)


def test_the_list_runs_nothing(capsys, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from gradguess_lab.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["compare", "--list", "--tasks", "mlp-mnist1d", "--methods", "dfa", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["runs"] == {
        "mlp-mnist1d, backprop": "3 runs of 25 epochs, then 3 of 100 epochs, sites auto, on cpu",
        "mlp-mnist1d, dfa": "3 runs of 25 epochs, then 3 of 100 epochs, sites auto, on cpu",
    }
    assert list(tmp_path.iterdir()) == []
    wrong = CliRunner().invoke(app, ["compare", "--grid", "a,b"])
    assert isinstance(wrong.exception, InputError)
    assert "--grid: expected learning rates" in str(wrong.exception)


def test_every_contender_is_said_to_send_something_back():
    assert {entry.sends for entry in contenders.CONTENDERS.values()} == {"nothing", "one piece", "all"}
