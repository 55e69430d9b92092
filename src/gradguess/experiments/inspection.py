"""What a guess does at each site of a network, measured during a run or of its checkpoint afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.errors import GradguessError
from gradguess.experiments.loss import per_sample_loss
from gradguess.extras import require

if TYPE_CHECKING:
    from gradguess.experiments.config import TrainConfig
    from gradguess.experiments.data import Dataset

NUMBERS = ("bias", "variance", "covariance_norm", "cosine", "rank", "gradient_norm")
CURVES = ("overlap", "singular_values")


def inspect_sites(
    model: nn.Module,
    guess: Any,
    data: Dataset,
    config: TrainConfig,
    curves: tuple[str, ...] = ("overlap",),
    forward: gg.ForwardGradient | None = None,
) -> dict[str, dict[str, Any]]:
    """`gg.diagnose` on the first batch of the training data, as values that JSON can hold.

    Diagnosing draws from a generator of its own, so that it does not change the run. Feedback is judged with what
    `forward` has learned, and without the curves of the Jacobian; other guesses compute a fresh basis.
    """
    generator = torch.Generator(config.device).manual_seed(config.seed)
    x, y = data.x_train[: config.batch], data.y_train[: config.batch]
    learned = forward if forward is not None and forward.learned else None
    report = gg.diagnose(
        model, guess, per_sample_loss, x, y, generator=generator, forward=learned, curve=learned is None
    )
    return {site: _plain(entry, NUMBERS + curves) for site, entry in report.items()}


def _plain(entry: Any, names: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in names:
        value = getattr(entry, name, None)
        if isinstance(value, Tensor):
            value = value.tolist()
        if value is not None:
            row[name] = list(value) if name in CURVES else value
    return row


def inspect_run(config: TrainConfig, directory: Path | None = None) -> dict[str, Any]:
    """The sites of a fresh network, or of the last checkpoint in `directory`."""
    from gradguess.experiments.data import load
    from gradguess.experiments.methods import guess_for
    from gradguess.experiments.train import build_model

    data = load(config.data).first(config.samples).to(config.device, getattr(torch, config.dtype))
    model, guess, forward = build_model(config, data), guess_for(config), None
    epoch = 0
    if directory is not None:
        parts, epoch = _stored(directory)
        model.load_state_dict(parts["model"])
        forward = gg.ForwardGradient(model, guess)
        forward.load_state_dict(parts["forward"])
    sites = inspect_sites(model, guess, data, config, CURVES, forward)
    return {"key": config.key, "epoch": epoch, "sites": sites}


def _stored(directory: Path) -> tuple[dict[str, dict[str, Tensor]], int]:
    """The parts of the checkpoint in `directory`, and its epoch."""
    from gradguess.experiments import checkpoint

    stored = checkpoint.load(directory)
    if stored is None:
        raise GradguessError(f"{directory} holds no checkpoint: expected the --out directory of gradguess train.")
    tensors, state = stored
    return {"model": {}, "forward": {}} | checkpoint.by_part(tensors), state["epoch"]


def save_plots(record: dict[str, Any], directory: Path) -> list[Path]:
    """One figure per curve, a line per site, as PNG and SVG."""
    Figure = require("matplotlib.figure", "report", "a plot").Figure
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    labels = {"overlap": "overlap with the true gradient", "singular_values": "singular value"}
    for curve in CURVES:
        sites = {site: row[curve] for site, row in record["sites"].items() if row.get(curve)}
        if not sites:
            continue
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="k", ylabel=labels[curve], title=f"{record['key']}, epoch {record['epoch']}")
        for site, values in sites.items():
            axes.plot(range(1, len(values) + 1), values, label=f"site {site}")
        axes.legend()
        for suffix in ("png", "svg"):
            paths.append(directory / f"{curve}.{suffix}")
            figure.savefig(paths[-1], dpi=150)
    return paths
