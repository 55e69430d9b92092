"""The loss of every experiment."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gradguess.model.task import LossFn


def per_sample_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy, (batch,); of a sequence (batch, time, classes) the mean over its positions.

    With `smoothing`, that part of a target's weight is spread over all classes.
    """
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return losses if targets.dim() == 1 else losses.view(targets.shape).mean(1)


def smoothed_loss(smoothing: float) -> LossFn:
    """What a run differentiates: `per_sample_loss` with this smoothing. Evaluations have none."""
    return partial(per_sample_loss, smoothing=smoothing) if smoothing else per_sample_loss
