"""The loss of every experiment."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def per_sample_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, (batch,); of a sequence (batch, time, classes) the mean over its positions."""
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses if targets.dim() == 1 else losses.view(targets.shape).mean(1)
