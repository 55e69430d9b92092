"""Local losses that predict and compare (the loss "predsim" of Nøkland and Eidnes 2019)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.baselines.local import Head, LocalLoss, features, linear_head, predicted
from gradguess.errors import InputError
from gradguess.methods.students.student import Outputs
from gradguess.model.site import Site
from gradguess.step.base import Step


@dataclass(frozen=True)
class PredSim(LocalLoss):
    """A linear head, and a second one whose features should be as alike as the classes of the samples are.

    Definition: the loss at a cut is `(1 - β) pred + β sim`. `pred` is that of `LocalLinear`. `sim` is the mean squared
    difference of two matrices of cosines between the samples of the batch: of a learned 3 × 3 convolution (for vectors
    a linear map) of `φ(s)`, of which each channel's standard deviation over positions is taken, and of the classes.
    Both are centred in each sample. Exact above the last cut. Bias, memory and time as `LocalLinear`, and a matrix of
    batch × batch. Samples are compared with each other, so a batch cannot be cut: `chunk` and processes are refused.
    Nøkland and Eidnes, "Training Neural Networks with Local Error Signals", ICML 2019, arXiv 1901.06656.

    Args:
        lr: learning rate of the heads.
        beta: `β`, from 0 to 1.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.PredSim(), sites=2)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["S"].shape
    torch.Size([8, 8])
    """

    beta: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise InputError(f"PredSim(beta): expected 0 <= beta <= 1, found {self.beta!r}.")

    def start(self, site: Site, s: Tensor, outputs: Outputs) -> Head:
        x = _channels_first(site, s)
        channels, moves = x.shape[1], x.dim() == 4 or (x.dim() == 3 and site.pattern.channels_first)
        taps = (3,) * (x.dim() - 2 if moves else 0)  # a convolution of images and signals, a linear map elsewhere
        source = torch.Generator().manual_seed(zlib.crc32(site.name.encode()))
        S = torch.empty(channels, channels, *taps, dtype=torch.float64)
        bound = (channels * 3 ** len(taps)) ** -0.5  # PyTorch's default
        S.uniform_(-bound, bound, generator=source)
        return {**linear_head(site, s, outputs), "S": S.to(x.device, x.dtype)}

    def loss(self, step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
        _check(step)
        x = _channels_first(site, s)
        classes = (step.task.targets[:, None] == torch.arange(len(head["b"]), device=x.device)).to(x.dtype)
        apart = F.mse_loss(cosines(_compared(x, head["S"])), cosines(classes))
        return (1 - self.beta) * predicted(step, site, s, head, outputs).sum() + self.beta * len(x) * apart


def _check(step: Step) -> None:
    """Refuse targets without classes, and parts of a batch."""
    t = step.task.targets
    if not isinstance(t, Tensor) or t.dim() != 1 or t.is_floating_point():
        found = f"shape {tuple(t.shape)}, {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
        raise InputError(
            f"PredSim compares the classes of samples: expected targets of whole numbers, shape (batch,), found "
            f"{found}. Use gg.baselines.LocalLinear()."
        )
    if step.share != 1:
        raise InputError(
            "PredSim compares all samples of a batch: it cannot be cut by chunk or shared by processes. Use "
            "gg.baselines.LocalLinear()."
        )


def _channels_first(site: Site, s: Tensor) -> Tensor:
    x = features(site, s)
    return x.mT if x.dim() == 3 and not site.pattern.channels_first else x


def _compared(x: Tensor, S: Tensor) -> Tensor:
    """(batch, channels): what is compared of the samples."""
    if S.dim() == 4:
        x = F.conv2d(x, S, padding=1)
    elif S.dim() == 3:
        x = F.conv1d(x, S, padding=1)
    else:
        x = F.linear(x.movedim(1, -1), S).movedim(-1, 1)
    return x.flatten(2).std(2) if x.dim() > 2 and x[0, 0].numel() > 1 else x.flatten(1)


def cosines(x: Tensor) -> Tensor:
    """(batch, batch): the cosine between any two rows, each without its mean."""
    x = F.normalize(x - x.mean(1, keepdim=True), dim=1, eps=1e-8)
    return x @ x.t()
