"""What pictures of guesses show: clouds of estimates and covariances, from the library with fixed seeds, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.guesses import Frame, Guess, SiteView
from gradguess.jacobian import GatedLinear
from gradguess.noise import Noise

DRAWS = 200  # estimates in a cloud
ANGLE = math.radians(30)  # of the gradient to the horizontal
TURN = math.radians(12)  # of the strongest direction of W̃ to the horizontal
SPREAD = (1.2, 0.5)  # singular values of W̃ at the site with two units
SAMPLES, UNITS, OPEN, K = 64, 8, 5, 3  # of the site whose directions are shown as bars
DECAY = (1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2)  # singular values of the layer above that site
double = partial(torch.tensor, dtype=torch.float64)


def frame_of(guess: Guess, weight: Tensor, gate: Tensor) -> Frame:
    """The guess's frame below a linear layer with these gates, after a search on the same samples."""
    W = GatedLinear(weight, gate)

    def view(kept: dict[str, Tensor]) -> SiteView:
        return SiteView("site", gate, gate, True, kept, Noise(torch.Generator().manual_seed(0)), lambda: W)

    return guess.frame(view(guess.search(view({}))))


def covariance(frame: Frame, d: int) -> Tensor:
    """`A Aᵀ` of every sample, (batch, d, d)."""
    eye = torch.eye(d, dtype=torch.float64)
    return frame.covariance_times(eye[:, None].expand(d, frame.batch, d)).movedim(0, 2)


@dataclass
class Plane:
    """A cloud of single estimates of a gradient of length one in a plane, and what is known of their law."""

    g: Tensor  # (2,)
    cloud: Tensor  # (DRAWS, 2)
    cov: Tensor  # of the directions, (2, 2)
    mean: Tensor  # of an estimate, (2,)
    variance: float  # the trace of its covariance
    start: Tensor  # what is known before the guess, (2,)

    @property
    def bias(self) -> float:
        return float((self.mean - self.g).norm())


def law(g: Tensor, cloud: Tensor, cov: Tensor, others: float = 0.0, start: Tensor | None = None) -> Plane:
    """Mean and variance for Gaussian directions, as `docs/guesses.md` and `docs/feedback.md` have them.

    `others` is the mean square of what other sites and parameters add to the measured derivative.
    """
    start = torch.zeros_like(g) if start is None else start
    δ = g - start
    variance = cov.trace() * (δ @ cov @ δ + others) + (cov @ δ).square().sum()
    return Plane(g, cloud, cov, start + cov @ δ, float(variance), start)


def rotated(angle: float) -> Tensor:
    return double([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def linear_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum(1)


def two_units() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A network with two open units: model, one input, its target, the gradient."""
    V, g = rotated(TURN), rotated(ANGLE)[:, 0]
    W = rotated(0.7) @ torch.diag(double(SPREAD)) @ V.T
    target = torch.linalg.solve(W.T, g)
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    model[0].weight.data, model[2].weight.data = torch.ones(2, 1, dtype=torch.float64), W
    return model, torch.ones(1, 1, dtype=torch.float64), target[None], g


def guessed(guess: Guess) -> Plane:
    """One estimate for each of `DRAWS` equal samples; no noise of the site above."""
    model, x, t, g = two_units()
    source = torch.Generator().manual_seed(1)
    est = gg.estimate(
        model, guess, linear_loss, x.expand(DRAWS, -1), t.expand(DRAWS, -1), isolate=True, generator=source
    )
    frame = frame_of(guess, model[2].weight.detach(), torch.ones(1, 2, dtype=torch.float64))
    return law(g, est.site_grads["0"], covariance(frame, 2)[0])


def perturbed(method: gg.WeightPerturbation | gg.baselines.MeZO, parameters: int) -> Plane:
    """Two parameters of a linear model with `parameters` of them, all with gradients of about the same size."""
    g = rotated(ANGLE)[:, 0]
    x = torch.cat([g, torch.full((parameters - 2,), math.sqrt(0.5), dtype=torch.float64)])[None]
    model = nn.Linear(parameters, 1, bias=False).double()
    model.weight.data.zero_()
    source, cloud = torch.Generator().manual_seed(1), []
    for _ in range(DRAWS):
        est = gg.estimate(model, method, linear_loss, x, torch.ones(1, 1, dtype=torch.float64), generator=source)
        cloud.append(est.grads["weight"][0, :2])
    return law(g, torch.stack(cloud), torch.eye(2, dtype=torch.float64), others=(parameters - 2) / 2)


def along_a_student(angle: float) -> Plane:
    """A local guess whose student is a linear map; its gradient points `angle` beside the true one."""
    model, x, t, g = two_units()
    h = rotated(ANGLE - angle)[:, 0]

    def make(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
        student = nn.Linear(2, 2, bias=False)
        student.weight.data = torch.outer(t[0], h).float()
        return student

    x, t = x.expand(DRAWS, -1), t.expand(DRAWS, -1)
    source = torch.Generator().manual_seed(1)
    cloud = gg.estimate(model, gg.LocalGuess(make), linear_loss, x, t, generator=source).site_grads["0"]
    cov = torch.outer(h, h)
    # The direction has one length: only the other site, whose gradient is t, adds noise.
    return Plane(g, cloud, cov, cov @ g, float(t[0].square().sum()), torch.zeros_like(g))


def corrected(lessons: int) -> Plane:
    """Feedback, corrected, after some lessons from white noise. Each estimate is a step that teaches nothing."""
    model, x, t, g = two_units()
    guess = gg.ActivationPerturbation()

    def forward(rate: float, seed: int) -> gg.ForwardGradient:
        return gg.ForwardGradient(model, gg.Feedback(guess, form="corrected", rate=rate), seed=seed)

    teacher, taught = forward(0.3, 0), forward(0.0, 1)
    for _ in range(lessons):
        teacher(linear_loss, x.expand(8, -1), t.expand(8, -1))
    if lessons:
        taught.load_state_dict(teacher.state_dict())
    cloud = []
    for _ in range(DRAWS):
        model.zero_grad()
        taught(linear_loss, x, t)
        cloud.append(model[0].weight.grad[:, 0].clone())
    h = taught.learned["0"]["B"] @ t[0] if lessons else torch.zeros_like(g)
    frame = frame_of(guess, model[2].weight.detach(), torch.ones(1, 2, dtype=torch.float64))
    return law(g, torch.stack(cloud), covariance(frame, 2)[0], start=h)


@dataclass
class Bars:
    """Means over the samples of a batch at a site with `UNITS` units, `OPEN` of them open."""

    weights: list[float]  # `vᵀ Cov(y) v` by singular direction v of W̃, strongest first
    shares: list[float]  # of the squared gradient, on each v
    bias: float  # for gradients of length one
    variance: float


def bars_of(guess: Guess) -> Bars:
    """What a guess does at a site whose samples have gates of their own; gradients are `W̃ᵀε`, made as long as one."""
    source = torch.Generator().manual_seed(2)
    normal = partial(torch.randn, generator=source, dtype=torch.float64)
    U, V = (torch.linalg.qr(normal(UNITS, UNITS))[0] for _ in range(2))
    W = U @ torch.diag(double(DECAY)) @ V.T
    gate = (normal(SAMPLES, UNITS).argsort(1).argsort(1) < OPEN).double()
    Vh = torch.linalg.svd(W * gate[:, None, :])[2]
    g = (normal(SAMPLES, UNITS) @ W) * gate
    g = g / g.norm(dim=1, keepdim=True)
    cov = covariance(frame_of(guess, W, gate), UNITS)
    mean = torch.einsum("bde,be->bd", cov, g)
    variance = cov.diagonal(dim1=1, dim2=2).sum(1) * (g * mean).sum(1) + mean.square().sum(1)
    weights = torch.einsum("bjd,bde,bje->bj", Vh, cov, Vh)
    weights[:, OPEN:] = weights[:, OPEN:].mean(1, keepdim=True)  # directions without a singular value have no order
    shares = torch.einsum("bjd,bd->bj", Vh, g).square()
    bias = (mean - g).norm(dim=1)
    return Bars(weights.mean(0).tolist(), shares.mean(0).tolist(), float(bias.mean()), float(variance.mean()))
