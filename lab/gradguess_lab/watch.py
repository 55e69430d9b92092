"""A watch over the epochs of a run: it notices a run that diverged, collapsed or never began to learn, and says so."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradguess.errors import NonFiniteError

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
        kind, words = self._look(row)
        if not kind or kind in self.named:
            return None
        self.named.add(kind)
        return f"{kind}: {words} {self.remedy}"

    def _look(self, row: Row) -> tuple[str, str]:
        epoch, accuracy = row["epoch"], row.get("train_accuracy")
        wrong = [name for name in LOSSES if not math.isfinite(row.get(name, 0.0))]
        if wrong:
            return "diverged", f"the {wrong[0].replace('_', ' ')} of epoch {epoch} is NaN or infinite."
        self.idle = self.idle + 1 if row["loss"] >= self.chance_loss else 0
        if accuracy is not None and accuracy > self.best:
            self.best, self.best_epoch = accuracy, epoch
        if accuracy is not None and accuracy <= self.chance + NEAR and self.best >= self.chance + FAR:
            fell = f"the training accuracy fell to chance ({accuracy:.3f}), from {self.best:.3f} at epoch"
            return "collapsed", f"{fell} {self.best_epoch}."
        if self.idle >= PATIENCE:
            stays = f"the loss has been no better than chance ({self.chance_loss:.3f}) for {self.idle} epochs."
            return "not learning", stays
        return "", ""


def remedy(config: TrainConfig) -> str:
    """What to try against it.

    >>> from gradguess_lab.config import TrainConfig
    >>> remedy(TrainConfig(method="backprop", lr=0.1))
    'Try a smaller --lr (it is 0.1).'
    """
    tries = [f"a smaller --lr (it is {config.lr:g})"]
    if config.method.startswith("feedback"):
        tries += ["fewer sites (--sites 4)", "--bootstrap 0.3", "--method students --sites 4"]
    elif config.method.startswith(("students", "local", "frozen")):
        tries += [f"another number of pieces (--sites, it is {config.sites})"]
        tries += ["another --student-lr"] if config.method.startswith(("students", "local-guess")) else []
    elif config.method not in ("backprop", "checkpointed"):
        tries += ["--method feedback-chained or --method students --sites 4 instead of a bare guess"]
    return f"Try {', or '.join(tries)}."


@contextlib.contextmanager
def watching(
    config: TrainConfig, targets: Tensor, past: Iterable[Row], say: Callable[[str], None]
) -> Iterator[Callable[[Row], None]]:
    """What the block calls with each row of the log. An error about NaN is named as well, and raised on.

    Args:
        targets: class numbers of the training data.
        past: rows of the same run before it was interrupted; they are not spoken of again.
        say: gets the line.
    """
    watch = Watch(*chance(targets), remedy(config))
    for row in past:
        watch(row)

    def look(row: Row) -> None:
        line = watch(row)
        if line:
            say(line)

    try:
        yield look
    except NonFiniteError:
        say(f"diverged: a loss or a derivative became NaN or infinite. {watch.remedy}")
        raise


def chance(targets: Tensor) -> tuple[float, float]:
    """Loss and accuracy of a network that gives every sample the frequencies of the classes.

    >>> import torch
    >>> chance(torch.tensor([0, 1, 2, 3] * 5))
    (1.3862943611198906, 0.25)
    """
    counts = targets.flatten().cpu().bincount().double()
    shares = counts[counts > 0] / targets.numel()
    return float(-(shares * shares.log()).sum()), float(shares.max())
