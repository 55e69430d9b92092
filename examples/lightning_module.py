"""Lightning: the mixin replaces the backward pass; trainer, logging and checkpoints stay Lightning's."""

import logging
import os
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradguess as gg
from gradguess.integrations.lightning import ForwardGradientMixin
from gradguess_lab.data import load

fast = bool(os.environ.get("GRADGUESS_FAST"))
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(ForwardGradientMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 10))
        self.loss_fn = nn.CrossEntropyLoss(reduction="none")
        self.guess_with(self.net, gg.Feedback(gg.WPerp()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.forward_step(self.loss_fn, *batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0, verbose=False)
data = load("mnist1d")
train = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=256, shuffle=True)
test = DataLoader(TensorDataset(data.x_test, data.y_test), batch_size=1000)
trainer = L.Trainer(
    max_epochs=2 if fast else 30,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), train, test)
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
