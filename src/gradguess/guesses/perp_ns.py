"""W⊥-NS: W⊥ with the singular value decomposition replaced by Newton–Schulz iterations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from gradguess.errors import check_choice, check_count
from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Frame
from gradguess.jacobian import Dense, GatedLinear
from gradguess.linalg import largest_eigenvalue, top_eigenvalues
from gradguess.linalg.step_polynomials import nearest, placed, polynomial

PROBE = 16  # samples whose singular values set the scale and the threshold
OVERSAMPLE = 10  # vectors beyond k with which these are found
LANCZOS = 8  # steps for the largest singular value of every sample
MARGIN = 1.02  # other samples may have a slightly larger norm than those of the probe


@dataclass(frozen=True)
class WPerpNS(Guess):
    """W⊥ by an odd polynomial of degree 7, applied `steps` times to the Jacobian above.

    Direction `y = p^N(W̃/s)ᵀ ε` with `p^N` close to a step function: singular values above the step go to one, those
    below it to zero. Covariance `p^N(W̃)ᵀ p^N(W̃)`, close to `V_k V_kᵀ`. Bias `(Cov - I) g`. Cost: four products
    a step of matrices as large as the open units of a sample, or as its outputs where these are fewer.
    Paper: eqs. (9) and (10).

    The singular values that say where the step must be are found on a few samples every `refresh` steps. The
    coefficients are one of nine sets (`gradguess.linalg.step_polynomials`).

    Args:
        k: dimension of the guessing space: the polynomial is meant to keep the k largest singular values.
        steps: how often the polynomial is applied. Its coefficients are fitted for five.
        refresh: training steps between two estimates of the singular values.
        threshold: where the step lies.
            "placed", the default: halfway between σ_k and σ_{k+1}, by the choice of `s`. How these differ from sample
            to sample is predicted from the Frobenius norm of each. Directions whose singular values lie inside the
            step, about 3 % of its place wide, pass in part. Below 0.1 σ_1 no set reaches: fewer than k directions pass.
            "nearest", the paper's: `s = σ_1`, and the nearest of the sets for `σ_k/σ_1 = 0.1, …, 0.9`. The step lies
            up to 0.05 σ_1 beside σ_k.

    >>> import gradguess as gg
    >>> gg.WPerpNS()
    WPerpNS(k=10, steps=5, refresh=50, threshold='placed')
    """

    k: int = 10
    steps: int = 5
    refresh: int = 50
    threshold: Literal["placed", "nearest"] = "placed"

    searches = True
    steady = False  # how many units are open is looked up

    def __post_init__(self) -> None:
        check_count("WPerpNS(k)", self.k)
        check_count("WPerpNS(steps)", self.steps)
        check_count("WPerpNS(refresh)", self.refresh)
        check_choice("WPerpNS(threshold)", self.threshold, ("placed", "nearest"))

    def search(self, view: SiteView) -> dict[str, Tensor]:
        """What `W̃` is divided by, and the coefficients: from the singular values of a few samples."""
        values = self._singular_values(view)
        norm = (values[:, 0].max() * MARGIN).clamp_min(torch.finfo(values.dtype).tiny)
        if self.threshold == "nearest":
            chosen = nearest(float(values[:, -2].mean() / norm))
            return {"scale": norm, "coefficients": values.new_tensor(chosen.coefficients)}
        size, slope, middle = _law(_sizes(_jacobian(view, PROBE)), (values[:, -2] + values[:, -1]) / 2)
        chosen, factor = placed(float(middle / norm))
        found = {"scale": norm / factor, "coefficients": values.new_tensor(chosen.coefficients)}
        return found | {"size": size, "slope": slope}

    def _singular_values(self, view: SiteView) -> Tensor:
        """σ_1, …, σ_k and σ_{k+1} of each of the first samples, (samples, k + 1); zero beyond the rank."""
        W, s = _jacobian(view, PROBE), view.output[:PROBE]
        wanted, rank = min(self.k, W.m, W.d) + 1, min(W.m, W.d)
        start = view.noise.normal((min(W.d, wanted + max(wanted, OVERSAMPLE)), *s.shape), s.dtype, s.device)
        return top_eigenvalues(W.gram, start, wanted, rank).sqrt()

    def frame(self, view: SiteView) -> Frame:
        W, s = _jacobian(view), view.output
        fixed = torch.Generator(s.device).manual_seed(0)  # the same in a replay
        start = torch.randn(*s.shape, generator=fixed, dtype=s.dtype, device=s.device)
        own = largest_eigenvalue(W.gram, start, LANCZOS).clamp_min(0).sqrt() * MARGIN
        scale = view.found("scale")
        if self.threshold == "placed":
            ratio = (_sizes(W) / view.found("size")).clamp_min(0.1)  # a sample may have no open unit
            scale = scale * ratio ** view.found("slope")
        # a sample above the probe's norm is scaled by its own, lest the iteration diverge
        return Polynomial(W, torch.maximum(own, scale), tuple(view.found("coefficients").tolist()), self.steps)


def _jacobian(view: SiteView, samples: int | None = None) -> GatedLinear | Dense:
    """`W̃` of the first samples, by one matrix for all and a gate for each, or by a matrix for each."""
    W = view.W
    if isinstance(W, GatedLinear):
        return GatedLinear(W.weight, (torch.ones_like(view.output) if W.gate is None else W.gate)[:samples])
    return Dense(W.matrix()[:samples])


def _sizes(W: GatedLinear | Dense) -> Tensor:
    """The Frobenius norm of every sample's `W̃`, (batch,)."""
    if isinstance(W, Dense):
        return torch.linalg.vector_norm(W.W, dim=(-2, -1))
    assert W.gate is not None
    return (W.gate.square() @ W.weight.square().sum(0)).sqrt()


def _law(sizes: Tensor, middles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`middle_i ≈ middle (size_i / size)^slope` over the samples of the probe: size, slope, middle, 0-dim each.

    Samples with more open units have larger singular values. Measured on networks of width 128 and 512, this leaves a
    third to a half of the spread of `middle_i`.
    """
    tiny = torch.finfo(sizes.dtype).tiny
    alive = (middles > 0).to(sizes.dtype)  # the others have fewer than k open units
    share = alive / alive.sum().clamp_min(1)
    x, y = sizes.clamp_min(tiny).log(), torch.where(middles > 0, middles, 1.0).log()
    size, middle = share @ x, share @ y
    spread = alive * (x - size)
    slope = (spread * y).sum() / spread.square().sum().clamp_min(tiny)
    return size.exp(), slope.clamp(0, 1), middle.exp() * alive.amax()


class Polynomial(Frame):
    """`A = p^N(W̃/σ)ᵀ` of eqs. (9) and (10), by matrices of each sample's open units, or of its outputs where fewer.

    With `X_0 = W̃/σ`, `G_j = X_jᵀX_j` and `p(X) = X q(XᵀX)` the steps are `X_{j+1} = X_j q(G_j)`, so that
    `X_Nᵀ z = q(G_{N-1}) ⋯ q(G_0) X_0ᵀ z` and `G_{j+1} = q(G_j) G_j q(G_j)`. On the other side the same holds of
    `X_j X_jᵀ`, before `X_0ᵀ`. A step costs four products of these matrices. The last two steps cost none, since they
    are applied to vectors alone.

    A closed unit is a zero column of `W̃ = W D`. Without the closed units of a sample, `D WᵀW D` is a part of the one
    matrix `WᵀW`, and with half of the units open its products cost an eighth. Counting them waits for the device.
    """

    def __init__(self, W: GatedLinear | Dense, scale: Tensor, coefficients: tuple[float, ...], steps: int) -> None:
        self.W, self.scale = W, scale[:, None]
        self.coefficients, self.steps = coefficients, steps
        self.batch, self.latent, self.dtype = len(scale), W.m, scale.dtype
        gate = None if isinstance(W, Dense) else W.gate
        open_ = scale.new_ones(self.batch, W.d) if gate is None else (gate != 0).byte()
        most = max(1, int(open_.sum(1).max()))
        units = torch.argsort(open_, dim=1, descending=True, stable=True)[:, :most]
        self.units = units if most <= W.m else None  # (batch, a); None: the side of the outputs

    def apply(self, z: Tensor) -> Tensor:
        if self.units is None:
            return self.W.vjp(self._filter(z)) / self.scale
        return self._filter(self.W.vjp(z)) / self.scale

    def adjoint(self, v: Tensor) -> Tensor:
        if self.units is None:
            return self._filter(self.W.jvp(v)) / self.scale
        return self.W.jvp(self._filter(v)) / self.scale

    def _filter(self, v: Tensor) -> Tensor:
        """`q(G_{N-1}) ⋯ q(G_0) v`: (..., batch, d), zero on closed units, or (..., batch, m)."""
        units = None if self.units is None else self.units.expand(*v.shape[:-1], -1)
        u = v if units is None else v.gather(-1, units)
        u = u.reshape(-1, *u.shape[-2:]).permute(1, 2, 0)  # (batch, a or m, vectors)
        for j in range(self.steps):
            u = self._q(j, u)
        u = u.permute(2, 0, 1).reshape(*v.shape[:-1], -1)
        return u if units is None else torch.zeros_like(v).scatter_(-1, units, u)

    @cached_property
    def grams(self) -> list[Tensor]:
        """`G_0, ..., G_{N-2}`, each (batch, a, a) or (batch, m, m)."""
        W, units = self.W, self.units
        if isinstance(W, Dense) or units is None or W.gate is None:
            X = W.matrix() / self.scale[..., None]
            grams = [X @ X.mT if units is None else X.mT @ X]
        else:
            gate = W.gate.gather(1, units) / self.scale
            products = W.product[units[:, :, None], units[:, None, :]]
            grams = [products.mul_(gate[:, :, None]).mul_(gate[:, None, :])]
        while len(grams) < self.steps - 1:
            q = polynomial(grams[-1], self.coefficients)
            grams.append(q @ grams[-1] @ q)
        return grams

    def _q(self, j: int, v: Tensor) -> Tensor:
        """`q(G_j) v` by Horner's rule."""
        total = self.coefficients[-1] * v
        for c in reversed(self.coefficients[:-1]):
            total = self._times(j, total) + c * v
        return total

    def _times(self, j: int, v: Tensor) -> Tensor:
        """`G_j v`. The last `G_j` is not formed, since seven products of the one before do the same."""
        if j < len(self.grams):
            return self.grams[j] @ v
        return self._q(j - 1, self._q(j - 1, self._times(j - 1, v)))
