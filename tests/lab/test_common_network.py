"""The common-network experiment: what is trained and measured, and its verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from gradguess_lab import checkpoint, common_network, store
from gradguess_lab.common_network import BIASES, TRAINED, continued, last_batch, measure, network
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.tables.common import SIX
from gradguess_lab.train import build_model


def test_networks_are_trained_twice_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(common_network, "EPOCHS", (1, 2))
    measure(tmp_path, "backprop,wt", "gate", 1, jobs=1)
    record = store.find(tmp_path, "networks")
    assert record is not None
    names = [(row["trained"], row["biases"], row["epochs"], row["seed"]) for row in record["rows"]]
    assert names == [(trained, "gate", epochs, 0) for trained in ("backprop", "wt") for epochs in (1, 2)]
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*.json")}
    measure(tmp_path, "backprop,wt", "gate", 1, jobs=1)
    assert store.find(tmp_path, "networks") == record
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    # the second run goes on from the first with a fresh AdamW, through the next order of the samples
    data, first = load("mnist1d"), network("backprop", "gate", 0)
    config = dataclasses.replace(first.settings, epochs=2)
    stored = [checkpoint.load(job.directory(tmp_path)) for job in (first, continued(first, tmp_path))]
    model, shuffle = build_model(config, data), torch.Generator().manual_seed(0)
    for epoch, found in enumerate(stored):
        optimiser = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay, fused=True)
        for places in torch.randperm(len(data.x_train), generator=shuffle).split(config.batch):
            optimiser.zero_grad()
            per_sample_loss(model(data.x_train[places]), data.y_train[places]).mean().backward()
            optimiser.step()
        assert found is not None
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(found[0][f"model/{name}"], weight, rtol=1e-4, atol=1e-6)
        assert torch.equal(last_batch(dataclasses.replace(config, epochs=epoch + 1), len(data.x_train)), places)


def test_every_network_is_a_run_of_its_own():
    jobs = [network(trained, biases, 0) for trained in TRAINED for biases in BIASES]
    assert len({job.key for job in jobs}) == len({job.variant for job in jobs}) == len(jobs)
    assert network("reduced", "gate", 3).key == "wperp-bottom-w128-s3-scriptmask+bottom"
    assert network("wperp", "added", 3).key == "wperp-w128-s3-biasTrue-solversubspace"


def test_a_setting_explains_only_with_all_six(tmp_path, capsys):
    printed = {(e.method, e.quantity): e.value for e in SIX.values()}
    assert len(printed) == 6
    rows = []
    for trained, factor in (("wt", 1.0), ("wperp", 1.5)):
        for seed in range(3):
            guesses = {}
            for method in ("wt", "wperp", "wperp-bottom"):
                bias, variance = printed[method, "bias"], (1 + 0.01 * seed) * printed[method, "variance"]
                if method == "wt":
                    variance *= factor
                guesses[method] = {"variance": variance, "drawn": 0.0, "bias": bias, "covariance_norm": 0.08}
            guesses["script-bottom"] = guesses["wperp-bottom"]
            settings = {"trained": trained, "biases": "none", "seed": seed, "epochs": 300}
            rows.append({**settings, "train_accuracy": 0.3, "guesses": guesses})
    (tmp_path / "networks.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    common_network.keep(tmp_path, tmp_path / "study")
    capsys.readouterr()
    printed_tables = []
    for place in (tmp_path, tmp_path / "study"):
        common_network.table(place)
        printed_tables.append(capsys.readouterr().out)
    assert printed_tables[0] == printed_tables[1]
    assert "6 of 6" in printed_tables[0]
    assert "5 of 6" in printed_tables[0]
    assert "4 settings tried: 1 of them explain all six numbers, and at most 6 hold in one." in printed_tables[0]
