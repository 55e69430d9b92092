"""The covariance `Cov(y) = A Aᵀ` of a guess, in closed form where the kind of frame has one.

No `batch × d × d` array is built. Where a frame is known only by products that are too many to make, the diagonal and
the squared distance from the identity are unbiased estimates from `draws` random vectors, with a relative error of
about `√(2 / draws)`.

`s` is the output of the site as (batch, d): its shape, dtype and device are those of the directions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradguess.guesses.frames import Frame, Identity, Matrix, Transposed
from gradguess.jacobian import Dense, GatedLinear
from gradguess.noise import Noise

CHUNK = 1 << 24  # numbers in a temporary array
COLUMNS = 256  # products with a general Jacobian that are still worth an exact answer


def explicit(frame: Frame, s: Tensor) -> Frame:
    """The same frame, as a dense matrix where it is known by products alone and these are few."""
    closed = isinstance(frame, Identity) or (isinstance(frame, Transposed) and isinstance(frame.W, Dense | GatedLinear))
    if closed or frame.orthonormal or frame.latent > COLUMNS or frame.latent * s.numel() > CHUNK:
        return frame
    return Matrix(torch.cat(list(_columns(frame, s))).movedim(0, 1))


def _columns(frame: Frame, s: Tensor) -> Iterator[Tensor]:
    """The columns of every sample's `A`, a few at a time: (n, batch, d)."""
    eye = torch.eye(frame.latent, dtype=s.dtype, device=s.device)
    for rows in eye.split(max(1, CHUNK // (len(s) * max(s.shape[1], frame.latent)))):
        yield frame.apply(rows[:, None].expand(-1, len(s), -1))


def covariance(frame: Frame, s: Tensor, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
    """`diag Cov(y)`, (batch, d), and `‖Cov(y) - I‖_F`, (batch,)."""
    d = s.shape[1]
    if isinstance(frame, Identity):
        return torch.ones_like(s), s.new_zeros(len(s))
    if isinstance(frame, Matrix):
        m = frame.P.shape[-2]  # ‖PᵀP - I_d‖² = ‖PPᵀ - I_m‖² + d - m: the smaller product, for a few samples at a time
        eye = torch.eye(min(m, d), dtype=s.dtype, device=s.device)
        parts = frame.P.split(max(1, CHUNK // eye.numel()))
        squares = [((P @ P.mT if m < d else P.mT @ P) - eye).square().sum((-2, -1)) for P in parts]
        return frame.P.square().sum(-2), (torch.cat(squares) + max(d - m, 0)).sqrt()
    if isinstance(frame, Transposed) and isinstance(frame.W, GatedLinear):
        # Cov = D G D with one G = WᵀW for the batch: Σ_jk (D_j G_jk D_k - δ_jk)², its diagonal apart
        gram = frame.W.weight.double().mT @ frame.W.weight.double()
        q = torch.ones_like(s).double() if frame.W.gate is None else frame.W.gate.square().double()
        diagonal = q * gram.diagonal()
        others = ((q @ gram.fill_diagonal_(0).square()) * q).sum(-1)
        return diagonal, ((diagonal - 1).square().sum(-1) + others).sqrt()
    if frame.orthonormal:  # a projector: √(d - rank)
        diagonal = sum((part.square().sum(0) for part in _columns(frame, s)), start=torch.zeros_like(s))
        return diagonal, (d - diagonal.sum(-1).round()).clamp_min(0).sqrt()
    white = lambda size: noise.normal((len(s), size), s.dtype, s.device)  # noqa: E731
    diagonal = sum((frame.apply(white(frame.latent)).square() for _ in range(draws)), start=torch.zeros_like(s)) / draws
    drawn = (white(d) for _ in range(draws))
    total = sum(((frame.covariance_times(v) - v).square().sum(-1) for v in drawn), start=s.new_zeros(len(s)))
    return diagonal, (total / draws).sqrt()
