"""W⊥-NS: W⊥ with the singular value decomposition replaced by Newton–Schulz iterations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.guesses._base import Frame, Guess, Matrix, SiteView, check_count
from gradguess.linalg import batched_top_singular, newton_schulz

PROBE = 16  # samples whose singular values set the scale and the threshold
LANCZOS = 8  # Lanczos steps per singular value
MARGIN = 1.02  # other samples may have a slightly larger norm than those of the probe
CHUNK = 1 << 26  # numbers in a dense batch of Jacobians at once


@dataclass(frozen=True)
class WPerpNS(Guess):
    """W⊥ by an odd polynomial of degree 7, applied `steps` times to the Jacobian above.

    Direction `y = p^N(W̃/σ_1)ᵀ ε` with `p^N` close to a step function at `σ_k/σ_1`: singular values above it go to one,
    those below it to zero. Covariance `p^N(W̃)ᵀ p^N(W̃)`, close to `V_k V_kᵀ`. Bias `(Cov - I) g`. Cost: a dense
    `m × d` matrix per sample and `steps` products of its smaller Gram matrix. Paper: eqs. (9) and (10).

    `σ_1` and `σ_k` come from a Lanczos method on a few samples every `refresh` steps; the coefficients are the
    nearest of nine sets for `σ_k/σ_1 = 0.1, …, 0.9` (`gradguess.newton_schulz`).

    Args:
        k: dimension of the guessing space.
        steps: how often the polynomial is applied.
        refresh: steps between two estimates of the singular values.

    >>> import gradguess as gg
    >>> gg.WPerpNS()
    WPerpNS(k=10, steps=5, refresh=50)
    """

    k: int = 10
    steps: int = 5
    refresh: int = 50

    def __post_init__(self) -> None:
        check_count("WPerpNS(k)", self.k)
        check_count("WPerpNS(steps)", self.steps)
        check_count("WPerpNS(refresh)", self.refresh)

    def phase(self, count: int) -> str | None:
        return None  # Lanczos waits for the device

    def frame(self, view: SiteView) -> Frame:
        W = view.W.matrix().expand(view.output.shape[0], -1, -1)
        if view.due or "scale" not in view.cache:
            view.cache["scale"], view.cache["coefficients"] = self._fit(W[:PROBE], view)
        a = view.cache["coefficients"]
        rows = max(1, CHUNK // W[0].numel())
        return Matrix(torch.cat([newton_schulz(self._scaled(part, view), a, self.steps) for part in W.split(rows)]))

    def _scaled(self, W: Tensor, view: SiteView) -> Tensor:
        """Norm at most one: a sample above the probe's norm is scaled by its own, lest the iteration diverge."""
        start = torch.Generator(view.noise.generator.device).manual_seed(0)  # a replay must see the same
        own = _singular_values(W, 1, LANCZOS, start)[:, 0] * MARGIN
        return W / torch.maximum(own, view.cache["scale"])[:, None, None]

    def _fit(self, W: Tensor, view: SiteView) -> tuple[Tensor, Tensor]:
        """The spectral norm of the probe and the coefficients for its mean `σ_k / σ_1`."""
        from gradguess.newton_schulz import coefficients

        k = min(self.k, *W.shape[1:])
        values = _singular_values(W, k, LANCZOS * k, view.noise.generator)
        scale = (values.max() * MARGIN).clamp_min(torch.finfo(W.dtype).tiny)
        ratio = float(values[:, -1].mean() / scale)
        return scale, torch.tensor(coefficients(ratio), dtype=W.dtype, device=W.device)


def _singular_values(W: Tensor, k: int, steps: int, generator: torch.Generator) -> Tensor:
    """The k largest of every sample, (batch, k), by Lanczos."""
    batch, m, d = W.shape
    values, _ = batched_top_singular(
        lambda v: (W @ v[..., None])[..., 0],
        lambda u: (W.mT @ u[..., None])[..., 0],
        batch,
        m,
        d,
        k,
        steps=steps,
        generator=generator,
        dtype=W.dtype,
        device=W.device,
    )
    return values
