from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradguess.errors import GradguessError
from gradguess_lab.config import TrainConfig
from gradguess_lab.progress import Progress
from gradguess_lab.reproduce import reproduce
from gradguess_lab.run_many import is_finished, run_directory

pytest.importorskip("mnist1d")
typer_testing = pytest.importorskip("typer.testing")
SMALL = ["--width", "8", "--depth", "1", "--epochs", "2", "--batch", "2000", "--k", "2"]


def invoke(*arguments: str):
    from gradguess_lab.cli import app

    return typer_testing.CliRunner().invoke(app, arguments)


def test_train_prints_one_json_object_last():
    result = invoke("train", "--method", "wt", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert {"train_accuracy", "test_accuracy", "train_loss", "test_loss", "step_ms", "epochs"} <= set(record)
    assert record["epochs"] == 2


def test_every_field_is_an_option():
    import inspect

    from gradguess_lab.cli import app

    (callback,) = [command.callback for command in app.registered_commands if command.callback.__name__ == "train"]
    fields = {item.name for item in dataclasses.fields(TrainConfig)}
    assert fields < set(inspect.signature(callback).parameters)


def test_an_error_is_one_line_and_code_2():
    command = [sys.executable, "-m", "gradguess", "reproduce", "--only", "scalling"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "unknown experiment 'scalling'. Did you mean 'scaling'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_tensorboard_without_a_directory_is_refused():
    result = invoke("train", *SMALL, "--tensorboard")
    assert isinstance(result.exception, GradguessError)
    assert "--tensorboard needs --out" in str(result.exception)


@pytest.mark.parametrize("what", [[], ["--memory"], ["--task", "mlp-mnist"]])
def test_a_benchmark_on_a_device_that_is_not_there_is_refused(what: list[str]):
    result = invoke("bench", "--device", "nonsense", *what)
    assert isinstance(result.exception, GradguessError)
    assert "device 'nonsense' cannot be used" in str(result.exception)


def test_reproduce_runs_what_is_missing_and_reports_failures(tmp_path: Path):
    pytest.importorskip("joblib")
    good = TrainConfig(method="wt", width=8, depth=1, epochs=2, batch=2000)
    bad = dataclasses.replace(good, device="nonsense")
    records, failures = reproduce({"mine": [good, good, bad]}, tmp_path, jobs=1)
    assert [record["key"] for record in records] == [good.key]
    assert list(failures) == [bad.key]
    assert json.loads((tmp_path / "experiments.json").read_text()) == {"mine": [good.key, good.key, bad.key]}
    stamp = (tmp_path / "runs" / good.key / "result.json").stat().st_mtime_ns
    again, _ = reproduce({"mine": [good]}, tmp_path, jobs=1)
    assert again == records
    assert (tmp_path / "runs" / good.key / "result.json").stat().st_mtime_ns == stamp
    progress = Progress(tmp_path, [good])
    assert (progress.finished, progress.fraction, progress.running) == (1, 1.0, [])


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"metrics": {"train_accuracy": 1.0}}', "other lr", "other key", "no epochs"],
)
def test_a_result_that_is_torn_or_of_another_configuration_is_not_finished(tmp_path: Path, content: str):
    config = TrainConfig(method="wt", width=8, depth=1, epochs=2, batch=2000)
    whole = {"schema": 1, "key": config.key, "config": config.as_dict(), "metrics": {"epochs": 2}, "history": []}
    changed = {
        "other lr": whole | {"config": config.as_dict() | {"lr": 0.5}},
        "other key": whole | {"key": "x"},
        "no epochs": whole | {"metrics": {}},
    }
    path = run_directory(tmp_path, config) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(whole))
    assert is_finished(tmp_path, config)
    assert Progress(tmp_path, [config]).epochs(config) == 2
    path.write_text(json.dumps(changed[content]) if content in changed else content)
    assert not is_finished(tmp_path, config)
    assert Progress(tmp_path, [config]).epochs(config) == 0
    pytest.importorskip("joblib")
    records, failures = reproduce({"mine": [config]}, tmp_path, jobs=1)
    assert records == []
    assert list(failures) == [config.key]  # and it is not written over


def test_names_of_experiments_stay_inside_the_directory(tmp_path: Path):
    pytest.importorskip("joblib")
    config = TrainConfig(method="wt", width=8, depth=1, epochs=1, batch=4000)
    reproduce({"../../outside": [config]}, tmp_path / "out", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_results_of_other_calls_stay(tmp_path: Path):
    """Also where the directories of their runs are gone, as in this repository."""
    pytest.importorskip("joblib")
    one = TrainConfig(method="wt", width=8, depth=1, epochs=1, batch=4000)
    two = dataclasses.replace(one, seed=1)
    (first,), _ = reproduce({"mine": [one]}, tmp_path, jobs=1)
    shutil.rmtree(tmp_path / "runs")
    (second,), _ = reproduce({"mine": [two]}, tmp_path, jobs=1)
    assert load(tmp_path) == [first, second]
    (tmp_path / "results.jsonl").write_text("{")
    with pytest.raises(GradguessError, match=r"results.jsonl, line 1: expected a result as JSON"):
        reproduce({"mine": [two]}, tmp_path, jobs=1)


def load(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--backend", "ray"), ("--address", "here"), ("--solver", "svd"), ("--dump", "x.json"), ("--configs", "x.json")],
)
def test_streams_refuse_what_they_do_not_read(tmp_path: Path, option: str, value: str):
    result = invoke("reproduce", "--only", "streams", option, value, "--out", str(tmp_path))
    assert isinstance(result.exception, GradguessError)
    assert f"reads --preset, --seeds, --jobs, --out and --device, found {option}:" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_configurations_from_a_file_keep_what_is_finished(tmp_path: Path):
    pytest.importorskip("joblib")
    entries = [{"method": "wt", "width": 8, "depth": 1, "epochs": 1, "batch": 4000, "seed": seed} for seed in (0, 1)]
    configs, out = tmp_path / "configs.json", tmp_path / "out"
    arguments = ["reproduce", "--configs", str(configs), "--out", str(out), "--jobs", "1", "--json"]

    def results() -> dict[str, object]:
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        records = load(out)
        assert json.loads(result.stdout.splitlines()[-1])["runs"].keys() == {record["key"] for record in records}
        return {record["key"]: record for record in records}

    configs.write_text(json.dumps(entries[:1]))
    first = results()
    configs.write_text(json.dumps(entries))
    both = results()
    assert len(both) == 2
    assert both | first == both


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "absent.json"),
        ("{", "is truncated or not JSON"),
        ("{}", "must hold a JSON list, found dict"),
        ("[3]", "one JSON object for each run, found 3"),
        ('[{"widht": 3}]', "'width'"),
    ],
)
def test_a_file_that_holds_no_configurations_is_refused(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "absent.json"
    if content is not None:
        path.write_text(content)
    result = invoke("reproduce", "--configs", str(path), "--out", str(tmp_path / "out"))
    assert isinstance(result.exception, GradguessError)
    assert message in str(result.exception)


def test_an_error_that_nobody_foresaw_ends_one_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from gradguess_lab import run_many

    def broken(config: TrainConfig, out: Path) -> None:
        out.mkdir(parents=True)
        raise MemoryError("out of memory")

    monkeypatch.setattr("gradguess_lab.train.train", broken)
    key, message = run_many._run_one(TrainConfig(), tmp_path / "run")
    assert key == TrainConfig().key
    assert message.startswith("MemoryError: out of memory")
    assert "MemoryError" in (tmp_path / "run" / "error.txt").read_text()


def test_diagnose_prints_a_fresh_network_and_a_checkpoint(tmp_path: Path):
    run, plots = tmp_path / "run", tmp_path / "plots"
    assert invoke("train", "--method", "wperp", *SMALL, "--out", str(run)).exit_code == 0
    fresh = invoke("diagnose", "--method", "wperp", *SMALL, "--json")
    assert json.loads(fresh.stdout.splitlines()[-1])["epoch"] == 0
    result = invoke("diagnose", "--run", str(run), "--out", str(plots), "--json")
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["epoch"] == 2
    assert {"bias", "variance", "overlap", "singular_values"} <= set(record["sites"]["0"])
    assert {path.name for path in plots.iterdir()} >= {"overlap.png", "overlap.svg"}
    empty = invoke("diagnose", "--run", str(tmp_path))
    assert isinstance(empty.exception, GradguessError)
