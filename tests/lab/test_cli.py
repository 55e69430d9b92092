"""The commands: one JSON object last, one line for an error, and what they write."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradguess.errors import GradguessError, InputError
from gradguess_lab import store
from gradguess_lab.config import TrainConfig
from gradguess_lab.streams.config import StreamConfig

pytest.importorskip("mnist1d")
typer_testing = pytest.importorskip("typer.testing")
SMALL = ["--width", "8", "--depth", "1", "--epochs", "2", "--batch", "2000", "--k", "2"]


def invoke(*arguments: str):
    from gradguess_lab.cli import app

    return typer_testing.CliRunner().invoke(app, arguments)


def record_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "kind"), [("train", TrainConfig), ("stream", StreamConfig)])
def test_every_field_is_an_option(name: str, kind: type):
    from gradguess_lab.cli import app

    (callback,) = [command.callback for command in app.registered_commands if command.callback.__name__ == name]
    assert {item.name for item in dataclasses.fields(kind)} < set(inspect.signature(callback).parameters)


def test_an_error_is_one_line_and_code_2():
    command = [sys.executable, "-m", "gradguess", "reproduce", "--only", "scalling"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "found 'scalling'. Did you mean 'scaling'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *SMALL, "--tensorboard"], "--tensorboard needs --out"),
        (["bench", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["bench", "--task", "mlp-mnist", "--width", "8"], "leave out --width"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str):
    result = invoke(*arguments)
    assert isinstance(result.exception, GradguessError)
    assert message in str(result.exception)


def test_configurations_from_a_file_keep_what_is_finished(tmp_path: Path):
    entries = [{"method": "wt", "width": 8, "depth": 1, "epochs": 1, "batch": 4000, "seed": seed} for seed in (0, 1)]
    configs, out = tmp_path / "configs.json", tmp_path / "out"

    def results() -> dict[str, dict]:
        configs.write_text(json.dumps(entries[: 1 + out.exists()]))
        record = record_of(invoke("reproduce", "--configs", str(configs), "--out", str(out), "--jobs", "1", "--json"))
        assert Path(record["report"]).exists()
        assert record["runs"].keys() == store.rows(out).keys()
        return store.rows(out)

    first, both = results(), results()
    assert len(both) == 2
    assert both | first == both


def test_a_dump_is_what_configs_reads(tmp_path: Path):
    path = tmp_path / "runs.json"
    record_of(invoke("reproduce", "--only", "scaling", "--dump", str(path), "--json"))
    assert {TrainConfig.from_dict(entry).method for entry in json.loads(path.read_text())} >= {"weight", "wperp"}


def test_diagnose_prints_a_fresh_network_and_a_checkpoint(tmp_path: Path):
    run, plots = tmp_path / "run", tmp_path / "plots"
    assert invoke("train", "--method", "wperp", *SMALL, "--out", str(run)).exit_code == 0
    assert record_of(invoke("diagnose", "--method", "wperp", *SMALL, "--json"))["epoch"] == 0
    record = record_of(invoke("diagnose", "--run", str(run), "--out", str(plots), "--json"))
    assert record["epoch"] == 2
    assert {"bias", "variance", "overlap", "singular_values"} <= set(record["sites"]["0"])
    assert {path.name for path in plots.iterdir()} >= {"overlap.png", "overlap.svg"}
    empty = invoke("diagnose", "--run", str(tmp_path))
    assert isinstance(empty.exception, GradguessError)


ADVISE = ["advise", "--width", "8", "--depth", "2", "--batch", "16", "--seconds", "0.1"]


def test_advise_prints_one_json_object_last():
    record = record_of(invoke(*ADVISE, "--json", "--memory-mb", "0.0001", "--sites", "2"))
    assert record["method"] is None
    assert "Nothing that was measured fits" in record["recommendation"]
    assert record["rows"][1]["code"].endswith("Checkpointed(), sites=2)")


def test_advise_computes_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []

    def note(*task, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        raise InputError("seen enough")

    monkeypatch.setattr("gradguess.advise", note)
    for options in ([], ["--autocast"]):
        assert isinstance(invoke(*ADVISE, *options).exception, InputError)
    assert seen == [False, True]
