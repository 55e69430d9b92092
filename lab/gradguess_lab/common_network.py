"""The common-network experiment: which settings explain the paper's variances and biases at width 128.

The authors' `compute_layer_metrics` measures several guesses on one network. Their history continues stored networks
with a fresh AdamW, and adds biases in one file and not in another. A setting is a way of training (`TRAINED`), a use of
biases (`BIASES`) and a number of epochs (`EPOCHS`; the second 300 start with a fresh AdamW).

`python -m gradguess_lab.common_network measure OUT` trains the networks that `OUT` lacks, as runs like all others, and
diagnoses each on the last batch of its last epoch, as the authors' scripts do. `keep OUT` stores what was measured as
`results/common.jsonl.gz`; `table` holds what is stored against the paper's numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import gradguess as gg
from gradguess.errors import GradguessError
from gradguess.guesses import SiteView
from gradguess.guesses.frames import Columns, Frame
from gradguess_lab import checkpoint, store
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import load
from gradguess_lab.files import read_json, write_json
from gradguess_lab.jobs import Job, Plan, Row, ended, run_plans
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.scripts import scripted
from gradguess_lab.train import build_model

TRAINED: dict[str, dict[str, str]] = {
    "wt": {"method": "wt"},
    "wperp": {"method": "wperp", "solver": "subspace"},
    "wperp-bottom": {"method": "wperp-bottom"},
    "reduced": {"method": "wperp-bottom", "script": "bottom"},  # W⊥-bottom as the scripts have it
    "backprop": {"method": "backprop"},
}
BIASES = ("none", "gate", "added")  # gate: trained, not added, and seen by the guess alone, as in the scripts
EPOCHS = (300, 600)
SEEDS = 10
SITE = "0"  # layer 1
STUDY, KEY = Path("results/common"), "networks"  # where measurements are stored
KEPT, NORM = ("variance", "drawn", "bias"), ("wt", "covariance_norm")
app = typer.Typer(no_args_is_help=True)


def network(trained: str, biases: str, seed: int, device: str = "cpu") -> Job:
    """The first run of a network."""
    scripts = filter(None, ["mask" if biases == "gate" else "", TRAINED[trained].get("script", "")])
    own = TRAINED[trained] | {"script": ",".join(scripts)}
    config = TrainConfig(epochs=EPOCHS[0], seed=seed, device=device, bias=biases == "added", **own)  # type: ignore[arg-type]
    return Job("common", "mlp-mnist1d", f"{trained}, {biases}", config)


def continued(job: Job, out: Path) -> Job:
    """The run that goes on where this one ended, with a fresh AdamW."""
    more = dataclasses.replace(job.at(epochs=EPOCHS[1]), variant=f"{job.variant}, AdamW afresh")
    directory, stored = more.directory(out), checkpoint.load(job.directory(out))
    if stored is not None and not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: value for name, value in stored[0].items() if not name.startswith("optimiser/")}
        checkpoint.save(directory, tensors, stored[1])
        write_json(directory / "config.json", more.settings.as_dict())
    return more


def plan(job: Job, out: Path) -> Plan:
    """Both runs of a network."""
    if (yield [job])[job.key] is not None:
        yield [continued(job, out)]


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


GUESSES: dict[str, Any] = {
    "wt": gg.WTranspose(),
    "wperp": gg.WPerp(solver="subspace"),
    "wperp-bottom": gg.WPerp(solver="subspace", end="bottom"),
    "script-bottom": ScriptBottom(),
}


def last_batch(config: TrainConfig, samples: int) -> torch.Tensor:
    """The places of the samples of a run's last step."""
    shuffle = torch.Generator().manual_seed(config.seed)
    orders = [torch.randperm(samples, generator=shuffle) for _ in range(config.epochs)]
    return orders[-1].split(config.batch)[-1]


def diagnosed(net: nn.Module, config: TrainConfig) -> dict[str, dict[str, float]]:
    """What the paper's table has of each guess, at layer 1. `drawn` is the variance from one direction a sample."""
    data = load(config.data)
    places = last_batch(config, len(data.x_train))
    x, y = data.x_train[places], data.y_train[places]
    true = gg.estimate(net, gg.Backprop(), per_sample_loss, x, y).site_grads[SITE]
    found = {}
    for name, guess in GUESSES.items():
        method = scripted("mask" if "mask" in config.script else "", guess, net)
        generator = torch.Generator().manual_seed(config.seed)
        site = gg.diagnose(net, method, per_sample_loss, x, y, generator=generator, curve=False)[SITE]
        drawn = gg.estimate(net, method, per_sample_loss, x, y, generator=generator).site_grads[SITE]
        numbers = {key: getattr(site, key) for key in ("variance", "bias", "covariance_norm")}
        numbers["drawn"] = float(((drawn - true) / len(x)).square().mean(0).norm())
        kept = {key: value for key, value in numbers.items() if key in KEPT or (name, key) == NORM}
        found[name] = {key: float(f"{value:.6g}") for key, value in kept.items()}
    return found


def measured(trained: str, biases: str, job: Job, out: Path) -> Row | None:
    """The row of a network, measured now if it was not before; None if its run failed."""
    path, run, stored = job.directory(out) / "measured.json", job.row(out), checkpoint.load(job.directory(out))
    if path.exists():
        return read_json(path, "measurement")
    if run is None or stored is None or not ended(run):
        return None
    torch.set_num_threads(1)
    config = dataclasses.replace(job.settings, device="cpu")
    net = build_model(config, load(config.data))
    net.load_state_dict(checkpoint.by_part(stored[0])["model"])
    setting = {"epochs": config.epochs, "biases": biases, "trained": trained, "seed": config.seed}
    accuracy = {"train_accuracy": run["metrics"]["train_accuracy"]}
    write_json(path, setting | accuracy | {"guesses": diagnosed(net, config)})
    return read_json(path, "measurement")


@app.command()
def measure(
    out: Path,
    trained: str = ",".join(TRAINED),
    biases: str = ",".join(BIASES),
    seeds: int = SEEDS,
    device: Annotated[str, typer.Option(help="Where networks are trained; they are measured on the CPU.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Parallel processes.")] = 2,
) -> None:
    """Train the networks that are missing, and diagnose those that are not measured."""
    import joblib

    from gradguess_lab.terminal import runs_bar  # here: a process that measures needs none

    settings = list(itertools.product(trained.split(","), biases.split(","), range(seeds)))
    firsts = [network(*one, device) for one in settings]
    with runs_bar() as show:
        runs, failures = run_plans([plan(job, out) for job in firsts], out, jobs, show)
    if not runs:
        raise GradguessError(f"no network was trained: {next(iter(failures.values()))}")
    both = [(one, job) for one, first in zip(settings, firsts, strict=True) for job in (first, continued(first, out))]
    pool = joblib.Parallel(n_jobs=jobs)
    found = pool(joblib.delayed(measured)(one[0], one[1], job, out) for one, job in both)
    seconds = sum(row["metrics"]["seconds"] for row in runs if row["config"]["epochs"] == EPOCHS[1])
    record = {"schema": 1, "kind": "common", "environment": runs[0]["environment"]}
    record |= {"training": [{"seconds": seconds}], "rows": [row for row in found if row]}
    write_json(out / f"{KEY}.json", record)
    print(f"{sum(map(bool, found))} networks measured, {len(failures)} runs failed")


@app.command()
def keep(out: Path, study: Path = STUDY) -> None:
    """Put what was measured into the study."""
    store.write(study, [{"key": KEY, **_record(out)}])


@app.command()
def table(place: Annotated[Path, typer.Argument()] = STUDY) -> None:
    """Print the six numbers of each setting below the paper's."""
    from gradguess_lab.tables import common  # scipy, which a machine that measures may lack

    tried = common.settings(_record(place)["rows"])
    print(f"{common.settings_table(tried).markdown()}\n\n{common.tried_sentence(tried)}")


def _record(place: Path) -> Row:
    found = store.find(place, KEY)
    if found is None:
        raise typer.BadParameter(f"expected measured networks in {place}, found none: measure them first.")
    return found


if __name__ == "__main__":
    app()
