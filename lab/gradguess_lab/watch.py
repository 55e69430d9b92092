"""A watch over the epochs of a run: it notices a run that diverged, collapsed or never began to learn, and says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig

PATIENCE = 20  # epochs without learning anything before they are mentioned
NEAR, FAR = 0.02, 0.1  # accuracy above chance that counts as chance, and as having learned
LOSSES = ("loss", "train_loss", "test_loss")
Row = Mapping[str, Any]  # of the log


class Watch:
    """Reads the rows of a run's log, epoch by epoch. Each kind of trouble is named once.

    Args:
        chance_loss: the loss of a network that knows the frequencies of the classes and nothing else.
        chance: its accuracy.
        remedy: what to try.
    """

    def __init__(self, chance_loss: float, chance: float, remedy: str) -> None:
        self.chance_loss, self.chance, self.remedy = chance_loss, chance, remedy
        self.best, self.best_epoch, self.idle = 0.0, 0, 0
        self.named: set[str] = set()

    def __call__(self, row: Row) -> str | None:
        """One line on what is wrong, or None."""
        epoch, accuracy, found = row["epoch"], row.get("train_accuracy"), ""
        self.idle = self.idle + 1 if row["loss"] >= self.chance_loss else 0
        if accuracy is not None and accuracy > self.best:
            self.best, self.best_epoch = accuracy, epoch
        if wrong := [name for name in LOSSES if not math.isfinite(row.get(name, 0.0))]:
            found = f"diverged: the {wrong[0].replace('_', ' ')} of epoch {epoch} is NaN or infinite."
        elif accuracy is not None and accuracy <= self.chance + NEAR and self.best >= self.chance + FAR:
            fell = f"the training accuracy fell to chance ({accuracy:.3f}), from {self.best:.3f} at epoch"
            found = f"collapsed: {fell} {self.best_epoch}."
        elif self.idle >= PATIENCE:
            stays = f"the loss has been no better than chance ({self.chance_loss:.3f}) for {self.idle} epochs."
            found = f"not learning: {stays}"
        kind = found.partition(":")[0]
        if not kind or kind in self.named:
            return None
        self.named.add(kind)
        return f"{found} {self.remedy}"


def watch_for(config: TrainConfig, targets: Tensor) -> Watch:
    """The watch over a run on training data with these class numbers.

    Chance is a network that gives every sample the frequencies of the classes.

    >>> import torch
    >>> from gradguess_lab.config import TrainConfig
    >>> watch = watch_for(TrainConfig(method="backprop", lr=0.1), torch.tensor([0, 1, 2, 3] * 5))
    >>> watch.chance_loss, watch.chance, watch.remedy
    (1.3862943611198906, 0.25, 'Try a smaller --lr (it is 0.1).')
    """
    counts = targets.flatten().cpu().bincount().double()
    shares = counts[counts > 0] / targets.numel()
    tries = [f"a smaller --lr (it is {config.lr:g})"]
    if config.method.startswith("feedback"):
        tries += ["fewer sites (--sites 4)", "--bootstrap 0.3", "--method students --sites 4"]
    elif config.method.startswith(("students", "local", "frozen")):
        tries += [f"another number of pieces (--sites, it is {config.sites})"]
        tries += ["another --student-lr"] if config.method.startswith(("students", "local-guess")) else []
    elif config.method not in ("backprop", "checkpointed"):
        tries += ["--method feedback-chained or --method students --sites 4 instead of a bare guess"]
    return Watch(float(-(shares * shares.log()).sum()), float(shares.max()), f"Try {', or '.join(tries)}.")
