"""The common-network experiment, measured: which settings explain the paper's variances and biases at width 128.

`python -m gradguess_lab.common_measures measure OUT` diagnoses each network of `common_network` on the last batch of
its last epoch, as the authors' scripts do, and writes a line of `OUT/measured.jsonl` for each. `table OUT...` holds the
six numbers against the paper's. A setting explains them only if all six lie in their intervals at once.
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
from gradguess_lab.common_network import BIASES, EPOCHS, TRAINED, Member, file_of, linears
from gradguess_lab.data import load
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.paper_numbers import BIAS_VARIANCE
from gradguess_lab.scripts import scripted

SITE = "0"  # layer 1
WAYS = ("ours", "scripts")
SIX = tuple(entry for entry in BIAS_VARIANCE if entry.quantity != "covariance_norm")
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
    """What was measured, by network."""
    paths = [folder / "measured.jsonl" for folder in folders]
    rows = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {(row["trained"], row["biases"], row["seed"], row["epochs"]): row for row in rows}


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
    todo = [one for one in stored if (one[0].trained, one[0].biases, one[0].seed, one[1]) not in known]
    with get_context("spawn").Pool(processes) as pool, (out / "measured.jsonl").open("a") as file:
        for row in pool.imap_unordered(_measured, todo):
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"{len(todo)} networks measured, {len(known)} known")


def six(rows: list[dict[str, Any]], way: str) -> list[list[float]]:
    """The values behind each of the paper's six numbers.

    ours: the expected variance, and any closed units for W⊥-bottom. scripts: the variance of one draw for each sample,
    and the null vectors of an SVD.
    """
    names = {"wperp-bottom": "script-bottom"} if way == "scripts" else {}
    quantities = {"variance": "drawn"} if way == "scripts" else {}
    return [
        [row["guesses"][names.get(e.method, e.method)][quantities.get(e.quantity, e.quantity)] for row in rows]
        for e in SIX
    ]


@app.command()
def table(folders: list[Path]) -> None:
    """Print the settings, the six numbers of each beside the paper's, and how many settings explain all six."""
    from gradguess_lab.tables.verdicts import HOLDS, Summary, verdict  # scipy, which a machine that measures may lack

    rows = list(lines(folders).values())
    heads = ["Trained by", "Biases", "Epochs", "Seeds", "Train accuracy", "Measured as"]
    heads += [f"{e.method} {e.quantity}, paper {e.printed}" for e in SIX] + ["Hold", "Wᵀ covariance norm, paper 0.084"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    held = []
    for epochs in EPOCHS:
        for biases in BIASES:
            for trained in TRAINED:
                key = {"trained": trained, "biases": biases, "epochs": epochs}
                chosen = [row for row in rows if key.items() <= row.items()]
                for way in WAYS if chosen else ():
                    found = [Summary.of(values) for values in six(chosen, way)]
                    verdicts = [verdict(entry, ours) == HOLDS for entry, ours in zip(SIX, found, strict=True)]
                    held.append(sum(verdicts))
                    numbers = [
                        f"{one.mean:.2e} ± {one.sd or 0:.1e} {'✓' if ok else '✗'}"
                        for one, ok in zip(found, verdicts, strict=True)
                        if one
                    ]
                    norm = np.mean([row["guesses"]["wt"]["covariance_norm"] for row in chosen])
                    accuracy = np.mean([row["train_accuracy"] for row in chosen])
                    cells = [trained, biases, epochs, len(chosen), f"{accuracy:.3f}", way, *numbers]
                    print("| " + " | ".join(map(str, [*cells, f"{held[-1]} of 6", f"{norm:.4f}"])) + " |")
    explain = sum(count == len(SIX) for count in held)
    print(f"\n{len(held)} settings tried; {explain} explain all six; at most {max(held, default=0)} of 6 hold in one.")


if __name__ == "__main__":
    app()
