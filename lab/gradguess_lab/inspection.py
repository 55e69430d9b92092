"""What a guess does at each site of a network, measured during a run or of its checkpoint afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.errors import GradguessError
from gradguess_lab.loss import per_sample_loss

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig
    from gradguess_lab.data import Dataset

NUMBERS = ("bias", "variance", "covariance_norm", "cosine", "rank", "gradient_norm")
CURVES = ("overlap", "singular_values")


def inspect_epoch(
    model: nn.Module, guess: Any, data: Dataset, config: TrainConfig, epoch: int, forward: gg.ForwardGradient
) -> dict[str, Any]:
    """What a run records of its guess after an epoch.

    `sites`: on the first batch of the training data, after the last epoch with the overlap. `last_batch`: on the last
    batch, where that is a smaller one, also as the authors measure it. `others`: bias and variance of the paper's other
    guesses on the same network.
    """
    if isinstance(guess, gg.Backprop):
        return {"sites": {}, "others": _others(model, data, config)}
    curves = ("overlap",) if epoch == config.epochs else ()
    record: dict[str, Any] = {"sites": inspect_sites(model, guess, data, config, curves, forward)}
    if len(data.x_train) % config.batch > 1:
        rows = _last_batch(data, config)
        record["last_batch"] = inspect_sites(model, guess, data, config, None, forward, rows)
        if isinstance(guess, gg.Guess):
            for site, value in _drawn_variances(model, guess, data, config, rows).items():
                record["last_batch"][site]["drawn_variance"] = value
    if isinstance(guess, gg.Guess):
        record["others"] = _others(model, data, config)
    return record


def _drawn_variances(
    model: nn.Module, guess: gg.Guess, data: Dataset, config: TrainConfig, rows: slice
) -> dict[str, float]:
    """The variance as the authors' scripts measure it: from one direction for each sample, where ours is expected."""
    x, y = data.x_train[rows], data.y_train[rows]
    generator = torch.Generator(config.device).manual_seed(config.seed)
    drawn = gg.estimate(model, guess, per_sample_loss, x, y, generator=generator).site_grads
    true = gg.estimate(model, gg.Backprop(), per_sample_loss, x, y).site_grads
    return {name: float(((g - true[name]) / len(x)).square().mean(0).norm()) for name, g in drawn.items()}


def _others(model: nn.Module, data: Dataset, config: TrainConfig) -> dict[str, Any]:
    """The paper's guesses on a network that was trained with another, in the paper's setting alone."""
    if config.model != "mlp" or config.data != "mnist1d" or config.script:
        return {}
    guesses = {
        "wt": gg.WTranspose(),
        "wperp": gg.WPerp(solver="subspace"),
        "wperp-bottom": gg.WPerp(solver="subspace", end="bottom"),
    }
    found: dict[str, Any] = {}
    for name, guess in guesses.items():
        if name != config.method:
            first = inspect_sites(model, guess, data, config, None)
            last = inspect_sites(model, guess, data, config, None, rows=_last_batch(data, config))
            found[name] = {
                site: {key: row[key] for key in ("bias", "variance")}
                | {f"last_{key}": last[site][key] for key in ("bias", "variance")}
                for site, row in first.items()
            }
    return found


def _last_batch(data: Dataset, config: TrainConfig) -> slice:
    """The samples of the last batch of an epoch."""
    return slice(-(len(data.x_train) % config.batch or config.batch), None)


def inspect_sites(
    model: nn.Module,
    guess: Any,
    data: Dataset,
    config: TrainConfig,
    curves: tuple[str, ...] | None = ("overlap",),
    forward: gg.ForwardGradient | None = None,
    rows: slice | None = None,
) -> dict[str, dict[str, Any]]:
    """`gg.diagnose` on the first batch of the training data, or on `rows` of it, as values that JSON can hold.

    Diagnosing draws from a generator of its own, so that it does not change the run. Feedback is judged with what
    `forward` has learned, and without the curves of the Jacobian; other guesses compute a fresh basis. With `curves`
    None the Jacobian is not decomposed, which leaves out its rank too.
    """
    generator = torch.Generator(config.device).manual_seed(config.seed)
    rows = slice(config.batch) if rows is None else rows
    learned = forward if forward is not None and forward.learned else None
    report = gg.diagnose(
        model,
        guess,
        per_sample_loss,
        data.x_train[rows],
        data.y_train[rows],
        generator=generator,
        forward=learned,
        curve=learned is None and curves is not None,
    )
    return {site: _plain(entry, NUMBERS + (curves or ())) for site, entry in report.items()}


def _plain(entry: Any, names: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in names:
        value = getattr(entry, name, None)
        if isinstance(value, Tensor):
            value = value.tolist()
        if value is not None:
            row[name] = [round(item, 6) for item in value] if name in CURVES else value
    return row


def inspect_run(config: TrainConfig, directory: Path | None = None) -> dict[str, Any]:
    """The sites of a fresh network, or of the last checkpoint in `directory`."""
    from gradguess_lab.data import load
    from gradguess_lab.train import build_method, build_model

    data = load(config.data).first(config.samples).to(config.device, getattr(torch, config.dtype))
    model, forward = build_model(config, data), None
    guess = build_method(config, model)
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
    from gradguess_lab import checkpoint

    stored = checkpoint.load(directory)
    if stored is None:
        raise GradguessError(f"{directory} holds no checkpoint: expected the --out directory of gradguess train.")
    tensors, state = stored
    return {"model": {}, "forward": {}} | checkpoint.by_part(tensors), len(state["rows"])


def save_plots(record: dict[str, Any], directory: Path) -> list[Path]:
    """One figure per curve, a line per site, as PNG and SVG."""
    from matplotlib.figure import Figure

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
