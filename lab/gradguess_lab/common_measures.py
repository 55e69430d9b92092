"""The common-network experiment, measured: which settings explain the paper's variances and biases at width 128.

`python -m gradguess_lab.common_measures measure OUT` diagnoses each network of `common_network` on the last batch of
its last epoch, as the authors' scripts do, and writes a line of `OUT/measured.jsonl` for each. `keep OUT...` stores
that as `results/common.jsonl.gz`; `table` holds what is stored against the paper's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

import gradguess as gg
from gradguess.guesses import SiteView
from gradguess.guesses.frames import Columns, Frame
from gradguess_lab import store
from gradguess_lab.common_network import BIASES, EPOCHS, Member, file_of, linears
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.scripts import scripted

SITE = "0"  # layer 1
STUDY, KEY = Path("results/common"), "networks"  # where measurements are stored
SETTING = ("epochs", "biases", "trained", "seed")
KEPT, NORM = ("variance", "drawn", "bias"), ("wt", "covariance_norm")
app = typer.Typer(no_args_is_help=True)


@dataclass(frozen=True)
class ScriptBottom(gg.Guess):
    """W⊥-bottom of the scripts: the last k rows of a reduced SVD, whose null vectors lean on few closed units.

    Layer 1 is decomposed. At layer 2 all null vectors give the same numbers of layer 1, since no gradient lies there.
    """

    k: int = 10

    def frame(self, view: SiteView) -> Frame:
        if view.name != SITE and view.W.m > self.k:
            assert view.gate is not None
            closed = 1 - (view.gate != 0).to(view.output.dtype)
            first = closed.cumsum(1).le(self.k) * closed
            return Columns(torch.diag_embed(first))
        return Columns(torch.linalg.svd(view.W.matrix(), full_matrices=False)[2][:, -self.k :].mT)


def networks(path: Path) -> Iterator[tuple[Member, int, nn.Sequential, Tensor, dict[str, float]]]:
    """Each stored network, the samples of its last batch, and its accuracies."""
    _, biases, epochs = path.stem.split("-")
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    for row, (trained, seed) in enumerate(zip(arrays["trained"], arrays["seed"], strict=True)):
        member = Member(str(trained), biases, int(seed))
        net = member.network()
        for layer, module in enumerate(linears(net)):
            with torch.no_grad():
                module.weight.copy_(torch.from_numpy(arrays[f"weight{layer}"][row]))
                if module.bias is not None:
                    module.bias.copy_(torch.from_numpy(arrays[f"bias{layer}"][row]))
        scores = {name: float(arrays[name][row]) for name in ("train_accuracy", "test_accuracy")}
        yield member, int(epochs), net, torch.from_numpy(arrays["places"][row].astype("int64")), scores


def diagnosed(net: nn.Sequential, member: Member, places: Tensor) -> dict[str, dict[str, float]]:
    """What the paper's table has of each guess, at layer 1. `drawn` is the variance from one direction a sample."""
    data = load("mnist1d")
    x, y = data.x_train[places], data.y_train[places]
    guesses: dict[str, Any] = {
        "wt": gg.WTranspose(),
        "wperp": gg.WPerp(solver="subspace"),
        "wperp-bottom": gg.WPerp(solver="subspace", end="bottom"),
        "script-bottom": ScriptBottom(),
    }
    true = gg.estimate(net, gg.Backprop(), per_sample_loss, x, y).site_grads[SITE]
    found = {}
    for name, guess in guesses.items():
        method = scripted("mask" if member.biases == "gate" else "", guess, net)
        generator = torch.Generator().manual_seed(member.seed)
        site = gg.diagnose(net, method, per_sample_loss, x, y, generator=generator, curve=False)[SITE]
        drawn = gg.estimate(net, method, per_sample_loss, x, y, generator=generator).site_grads[SITE]
        found[name] = {key: getattr(site, key) for key in ("variance", "bias", "covariance_norm", "gradient_norm")}
        found[name]["drawn"] = float(((drawn - true) / len(x)).square().mean(0).norm())
    return found


def _measured(one: tuple[Member, int, nn.Sequential, Tensor, dict[str, float]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    member, epochs, net, places, scores = one
    return {**vars(member), "epochs": epochs, **scores, "guesses": diagnosed(net, member, places)}


def lines(folders: list[Path]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What was measured, by network: what a folder holds counts before what is stored under its name."""
    paths = [folder / "measured.jsonl" for folder in folders]
    rows = [row for folder in folders for row in (store.find(folder, KEY) or {"rows": []})["rows"]]
    rows += [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {tuple(row[name] for name in SETTING): row for row in rows}


@app.command()
def measure(
    out: Path,
    done: Annotated[Path | None, typer.Option(help="A folder of measurements that are not made again.")] = None,
    processes: int = 1,
) -> None:
    """Diagnose the stored networks of a folder."""
    known = lines([out, done or out])
    paths = [out / file_of(name, epochs) for epochs in EPOCHS for name in BIASES]
    stored = (one for path in paths if path.exists() for one in networks(path))
    todo = [one for one in stored if (one[1], one[0].biases, one[0].trained, one[0].seed) not in known]
    with get_context("spawn").Pool(processes) as pool, (out / "measured.jsonl").open("a") as file:
        for row in pool.imap_unordered(_measured, todo):
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"{len(todo)} networks measured, {len(known)} known")


@app.command()
def keep(folders: list[Path], study: Path = STUDY) -> None:
    """Put what was measured into the study: six digits of what the tables need, and how the networks were trained."""

    def short(row: dict[str, Any]) -> dict[str, Any]:
        guesses = {
            name: {key: float(f"{value:.6g}") for key, value in found.items() if key in KEPT or (name, key) == NORM}
            for name, found in row["guesses"].items()
        }
        return {name: row[name] for name in (*SETTING, "train_accuracy")} | {"guesses": guesses}

    logs = [path.read_text().splitlines() for folder in folders if (path := folder / "progress.jsonl").exists()]
    ends = [line for log in logs for line in map(json.loads, log) if "environment" in line]
    if not ends:
        raise typer.BadParameter(f"expected a progress.jsonl with an environment in {folders}, as training writes it.")
    rows = sorted(map(short, lines(folders).values()), key=lambda row: [row[name] for name in SETTING])
    training = [{name: value for name, value in line.items() if name != "environment"} for line in ends]
    known = {"schema": 1, "kind": "common", "environment": ends[0]["environment"], "training": training}
    store.write(study, [{"key": KEY, **known, "rows": rows}])
    print(f"{len(rows)} networks stored")


@app.command()
def table(folders: Annotated[list[Path] | None, typer.Argument()] = None) -> None:
    """Print the six numbers of each setting below the paper's, of the stored study if no folder is given."""
    from gradguess_lab.tables import common  # scipy, which a machine that measures may lack

    places = folders or [STUDY]
    tried = common.settings(list(lines(places).values()))
    if not tried:
        raise typer.BadParameter(f"expected measured networks in {places}, found none: measure them first.")
    print(f"{common.settings_table(tried).markdown()}\n\n{common.tried_sentence(tried)}")


if __name__ == "__main__":
    app()
