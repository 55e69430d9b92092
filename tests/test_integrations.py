"""The packages that people use beside PyTorch, the real ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from models import generator

loss_fn = nn.CrossEntropyLoss(reduction="none")


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def toy(samples: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs whose class is the largest of the first three numbers."""
    x = torch.randn(samples, 6, generator=generator(1))
    return x, x[:, :3].argmax(1)


# --- Lightning -----------------------------------------------------------------------------------------------


def lightning_module(L: Any, guess: Any, **options: Any) -> Any:
    from gradguess.integrations.lightning import ForwardGradientMixin

    class Classifier(ForwardGradientMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.losses: list[float] = []
            self.guess_with(self.net, guess, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.forward_step(loss_fn, *batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimiser = torch.optim.AdamW(self.parameters(), lr=0.02)
            return [optimiser], [torch.optim.lr_scheduler.StepLR(optimiser, 10)]

    return Classifier()


def fit(L: Any, module: Any, epochs: int, checkpoint: Path | None = None, **options: Any) -> Any:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*toy()), batch_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            **{"logger": False, **options},
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer


def test_lightning_trains_steps_schedulers_and_resumes(tmp_path: Path):
    L = pytest.importorskip("lightning")
    guess = gg.Feedback(gg.WPerp(k=3))
    whole = lightning_module(L, guess)
    trainer = fit(L, whole, 10)
    assert len(whole.losses) == 20
    assert whole.losses[-1] < whole.losses[0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * 0.01)

    first, second = lightning_module(L, guess), lightning_module(L, guess)
    fit(L, first, 4).save_checkpoint(tmp_path / "model.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(L, second, 10, tmp_path / "model.ckpt")
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("guess", "options"),
    [(gg.WPerp(k=3), {}), (gg.Feedback(gg.WPerp(k=3)), {"sites": "leaf"}), (gg.Students(), {"sites": 2})],
    ids=["wperp", "feedback", "students"],
)
def test_lightning_logs_how_good_the_estimates_are(guess: Any, options: dict[str, Any]):
    """The numbers are those of `gg.diagnose`, and training goes on as it would without them."""
    L = pytest.importorskip("lightning")
    from gradguess.integrations.estimate_quality import EstimateQuality

    class Log(L.pytorch.loggers.logger.DummyLogger):
        rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

    module, log = lightning_module(L, guess, **options), Log()
    fit(L, module, 3, logger=log, log_every_n_steps=1, callbacks=[EstimateQuality(every=5, draws=4)])
    measured = [(step, row) for step, row in log.rows if "cosine/0" in row]
    assert [step for step, _ in measured] == [0, 5]
    found = measured[-1][1]
    assert set(found) == {f"{name}/{site}" for name in ("cosine", "bias", "variance") for site in ("0", "2")}
    x, y = (each[32:] for each in toy())  # the last batch
    how = {"forward": module.estimator, "generator": generator(6), "draws": 4, "curve": False}
    report = gg.diagnose(module.net, guess, loss_fn, x, y, **how, **options)
    assert found["cosine/0"] == pytest.approx(report["0"].cosine, rel=1e-4)
    assert found["variance/0"] == pytest.approx(report["0"].variance, rel=1e-4)
    plain = lightning_module(L, guess, **options)
    fit(L, plain, 3)
    assert plain.losses == module.losses


# --- loggers -------------------------------------------------------------------------------------------------


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    from gradguess.integrations.wandb import wandb_log

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb_log(tmp_path, "run", {"lr": 0.1}) as log:
        log({"epoch": 1, "loss": 0.5, "sites": {}})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
