"""What a guess does at each site of a network, measured during a run or of its checkpoint afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.errors import GradguessError
from gradguess_lab import checkpoint
from gradguess_lab.loss import per_sample_loss

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig
    from gradguess_lab.data import Dataset

Batch = tuple[Tensor, Tensor]
Sites = dict[str, dict[str, Any]]
NUMBERS = ("bias", "variance", "covariance_norm", "cosine", "rank", "gradient_norm")
BOTH = ("bias", "variance")  # what is recorded of the paper's other guesses
CURVES = {"overlap": "overlap with the true gradient", "singular_values": "singular value"}


def inspect_epoch(
    model: nn.Module, guess: Any, data: Dataset, config: TrainConfig, epoch: int, forward: gg.ForwardGradient
) -> dict[str, Any]:
    """What a run records of its guess after an epoch.

    `sites`: on the first batch of the training data, after the last epoch with the overlap. `last_batch`: on the last
    batch, where that is a smaller one, also as the authors measure it, from one direction for each sample. `others`:
    bias and variance of the paper's other guesses on the same network, in the paper's setting alone.
    """
    size = len(data.x_train) % config.batch
    first = data.x_train[: config.batch], data.y_train[: config.batch]
    last = data.x_train[-(size or config.batch) :], data.y_train[-(size or config.batch) :]
    record: dict[str, Any] = {"sites": {}}
    if isinstance(guess, gg.Backprop | gg.Guess):
        paper = config.model == "mlp" and config.data == "mnist1d" and not config.script
        record["others"] = {}
        for name in (name for name in OTHERS if paper and name != config.method):
            found, ended = (inspect_sites(model, OTHERS[name], batch, config, None) for batch in (first, last))
            record["others"][name] = {
                site: {key: row[key] for key in BOTH} | {f"last_{key}": ended[site][key] for key in BOTH}
                for site, row in found.items()
            }
    if isinstance(guess, gg.Backprop):
        return record
    curves = ("overlap",) if epoch == config.epochs else ()
    record["sites"] = inspect_sites(model, guess, first, config, curves, forward)
    if size > 1:
        record["last_batch"] = inspect_sites(model, guess, last, config, None, forward)
    if size > 1 and isinstance(guess, gg.Guess):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        drawn = gg.estimate(model, guess, per_sample_loss, *last, generator=generator).site_grads
        true = gg.estimate(model, gg.Backprop(), per_sample_loss, *last).site_grads
        for site, g in drawn.items():
            record["last_batch"][site]["drawn_variance"] = float(((g - true[site]) / size).square().mean(0).norm())
    return record


OTHERS = {
    "wt": gg.WTranspose(),
    "wperp": gg.WPerp(solver="subspace"),
    "wperp-bottom": gg.WPerp(solver="subspace", end="bottom"),
}


def inspect_sites(
    model: nn.Module,
    guess: Any,
    batch: Batch,
    config: TrainConfig,
    curves: Iterable[str] | None = ("overlap",),
    forward: gg.ForwardGradient | None = None,
) -> Sites:
    """`gg.diagnose` on a batch, as values that JSON can hold.

    Diagnosing draws from a generator of its own, so that it does not change the run. Feedback is judged with what
    `forward` has learned, and without the curves of the Jacobian; other guesses compute a fresh basis. With `curves`
    None the Jacobian is not decomposed, which leaves out its rank too.
    """
    generator = torch.Generator(config.device).manual_seed(config.seed)
    learned = forward if forward is not None and forward.learned else None
    curve = learned is None and curves is not None
    report = gg.diagnose(model, guess, per_sample_loss, *batch, generator=generator, forward=learned, curve=curve)
    sites: Sites = {}
    for site, entry in report.items():
        sites[site] = {}
        for name in (*NUMBERS, *(curves or ())):
            if (value := getattr(entry, name, None)) is not None:
                sites[site][name] = [round(float(x), 6) for x in value] if name in CURVES else value
    return sites


def inspect_run(config: TrainConfig, directory: Path | None = None) -> dict[str, Any]:
    """The sites of a fresh network, or of the last checkpoint in `directory`."""
    from gradguess_lab.data import load
    from gradguess_lab.train import build_method, build_model

    data = load(config.data).first(config.samples).to(config.device, getattr(torch, config.dtype))
    model, forward, epoch = build_model(config, data), None, 0
    guess = build_method(config, model)
    if directory is not None:
        stored = checkpoint.load(directory)
        if stored is None:
            raise GradguessError(f"{directory} holds no checkpoint: expected the --out directory of gradguess train.")
        parts, epoch = checkpoint.by_part(stored[0]), len(stored[1]["rows"])
        model.load_state_dict(parts["model"])
        forward = gg.ForwardGradient(model, guess)
        forward.load_state_dict(parts.get("forward", {}))
    batch = data.x_train[: config.batch], data.y_train[: config.batch]
    return {"key": config.key, "epoch": epoch, "sites": inspect_sites(model, guess, batch, config, CURVES, forward)}


def save_plots(record: dict[str, Any], directory: Path) -> list[Path]:
    """One figure per curve, a line per site, as PNG and SVG."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for curve, label in CURVES.items():
        if not (sites := {site: row[curve] for site, row in record["sites"].items() if row.get(curve)}):
            continue
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="k", ylabel=label, title=f"{record['key']}, epoch {record['epoch']}")
        for site, values in sites.items():
            axes.plot(range(1, len(values) + 1), values, label=f"site {site}")
        axes.legend()
        for suffix in ("png", "svg"):
            paths.append(directory / f"{curve}.{suffix}")
            figure.savefig(paths[-1], dpi=150)
    return paths
