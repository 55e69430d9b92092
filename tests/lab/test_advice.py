"""The command `gradguess advise`."""

from __future__ import annotations

import json

import pytest
import torch

from gradguess.errors import InputError

pytest.importorskip("mnist1d")
typer_testing = pytest.importorskip("typer.testing")
SMALL = ["--width", "8", "--depth", "2", "--batch", "16", "--seconds", "0.1"]


def invoke(*arguments: str):
    from gradguess_lab.cli import app

    return typer_testing.CliRunner().invoke(app, ["advise", *SMALL, *arguments])


def test_a_program_gets_one_json_object_last():
    result = invoke("--json", "--memory-mb", "0.0001", "--sites", "2")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["method"] is None
    assert "Nothing that was measured fits" in record["recommendation"]
    assert record["rows"][1]["code"].endswith("Checkpointed(), sites=2)")


def test_the_network_computes_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []

    def note(*task, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        raise InputError("seen enough")

    monkeypatch.setattr("gradguess.advise", note)
    for options in ([], ["--autocast"]):
        assert isinstance(invoke(*options).exception, InputError)
    assert seen == [False, True]
