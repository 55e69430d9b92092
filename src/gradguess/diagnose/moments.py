"""Moments of estimates: bias, variance and cosine against the true gradient.

Gradients are those of each sample's own loss; `summary` divides by the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess.diagnose.report import SiteReport
from gradguess.guesses.frames import Frame


class Errors:
    """Running moments of `ĝ - g` over several estimates."""

    def __init__(self, g: Tensor) -> None:
        self.g = g  # (batch, d)
        self.total = torch.zeros_like(g)
        self.square = torch.zeros_like(g[0])
        self.means: list[Tensor] = []

    def add(self, estimate: Tensor) -> None:
        error = estimate - self.g
        self.total += error
        self.square += error.square().mean(0)
        self.means.append(error.mean(0))

    def moments(self) -> tuple[Tensor, float, Tensor]:
        """Mean estimate (batch, d), bias, variance (d,). The noise of the average is taken off its square."""
        means, count = torch.stack(self.means), len(self.means)
        noise = means.var(0) / count if count > 1 else 0.0
        squared_bias = means.mean(0).square() - noise
        bias = squared_bias.sum().clamp_min(0).sqrt().item()
        return self.g + self.total / count, bias, self.square / count - squared_bias


def covariance_times(frame: Frame, g: Tensor) -> Tensor:
    """`Cov(y) g`, with a power of two taken out, so that small gradients survive the frame's precision."""
    scale = torch.ldexp(torch.ones_like(g[0, 0]), torch.frexp(g.abs().amax()).exponent)
    return frame.covariance_times((g / scale).to(frame.dtype)).double() * scale


def summary(
    g: Tensor, estimate: Tensor, mean: Tensor, bias: float, variance: Tensor, norm: float | None, batch: int
) -> SiteReport:
    """From the gradient of each sample's own loss to that of the mean loss."""
    return SiteReport(
        d=g.shape[1],
        bias=bias / batch,
        variance=variance.norm().item() / batch**2,
        covariance_norm=norm,
        cosine=_cosine(estimate, g),
        mean_cosine=_cosine(mean, g),
        gradient_norm=g.norm().item() / batch,
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    lengths = (a.norm() * b.norm()).item()
    return (a * b).sum().item() / lengths if lengths else 0.0
