"""The loss of every experiment, and how well a network does on its data."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.model.task import LossFn

if TYPE_CHECKING:
    from gradguess_lab.data import Dataset

SPLITS = ("train", "test")
CHUNK = 4096  # samples evaluated at once


def per_sample_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy, (batch,); of a sequence (batch, time, classes) the mean over its positions.

    With `smoothing`, that part of a target's weight is spread over all classes.
    """
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return losses if targets.dim() == 1 else losses.view(targets.shape).mean(1)


def smoothed_loss(smoothing: float) -> LossFn:
    """What a run differentiates: `per_sample_loss` with this smoothing. Evaluations have none."""
    return partial(per_sample_loss, smoothing=smoothing) if smoothing else per_sample_loss


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Mean loss and accuracy on both splits, each whole; for a text also bits per character."""
    scores: dict[str, Any] = {}
    was_training = model.training
    model.eval()
    for split in SPLITS:
        x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
        loss, right = 0.0, 0
        for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            outputs = model(inputs)
            loss += per_sample_loss(outputs, targets).sum().item()
            right += int((outputs.argmax(-1) == targets).sum())
        scores[f"{split}_loss"] = loss / len(y)
        scores[f"{split}_accuracy"] = right / y.numel()
        if data.kind == "text":
            scores[f"{split}_bits"] = scores[f"{split}_loss"] / math.log(2)
    model.train(was_training)
    return scores


@torch.no_grad()
def batch_accuracy(model: nn.Module, data: Dataset, batch: int) -> float:
    """The mean of the accuracies of the batches of the training data, the last of which may be smaller."""
    was_training = model.training
    model.eval()
    pairs = zip(data.x_train.split(batch), data.y_train.split(batch), strict=True)
    parts = [(model(x).argmax(-1) == y).double().mean() for x, y in pairs]
    model.train(was_training)
    return float(torch.stack(parts).mean())
