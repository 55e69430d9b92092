"""W⊥: guess inside the top-k right singular subspace of the Jacobian above (the paper's method)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradguess.compact import Compact
from gradguess.errors import InputError
from gradguess.graphs import graphed
from gradguess.guesses._base import Columns, Frame, GatedBasis, Guess, Open, SiteView, check_count, keep
from gradguess.linalg import (
    batched_top_subspace,
    chebyshev_top_subspace,
    orthonormal_columns,
    steady_top_subspace,
)
from gradguess.upstream import ClosedForm, Upstream

CAPTURABLE = 64  # whether a larger basis fills the space is looked up on the host
DIRECT = 64  # up to this size a Krylov space is cheap on every device
CHUNK = 1 << 26  # numbers in a dense batch of Jacobians that are decomposed at once
OVERSAMPLE = 6  # extra columns that make the subspace iteration converge faster
USUAL = (2, 8)  # degrees of the filter on a GPU, and
CAREFUL = (2, 4, 4)  # where the spectrum is steep: over the block the strongest direction has more than
STEEP = 12**2  # times the squared singular value of the weakest, or the last one that is wanted more than
BULK = 1.75  # times as much: filters of a high degree would cap too many of those
GPU_BLOCK = 32  # columns that cost a GPU no more than fewer: it waits for the matrix


@dataclass(frozen=True)
class WPerp(Guess):
    """Directions from the `k` strongest (or weakest) right singular vectors `V_k` of `W̃ = U S Vᵀ`.

    Direction `y = V_k U_kᵀ ε`, in law `V_k z` with `z ~ N(0, I_k)`. Covariance `V_k V_kᵀ`, a projector.
    Bias `(V_k V_kᵀ - I) g`: what of the gradient lies outside the subspace. Variance that of a k-dimensional guess,
    whatever the width. Paper: eqs. (7) and (8). A `k` above the rank gives the whole row space.

    Args:
        k: dimension of the guessing space.
        solver: how `V_k` is found.
            "svd", the reference: a dense SVD for every sample.
            "subspace": every sample's own `V_k`, to a projector error below 1e-2. On a CPU by products with the layer
            above that all samples share: nothing of size d × d per sample. On a GPU from the Gram matrix of each
            sample's open units, gathered from the one `WᵀW`.
            "shared": one basis for the batch, found every `refresh` steps, bent into each sample's gate:
            `D V C^{-½} z` with `C = Vᵀ D² V`, an exact rank-k projector inside the image of the gate.
            About the cost of W^T.
        refresh: steps between two searches for the shared basis.
        end: "top", or "bottom" for the k smallest singular values (the paper's control).

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WPerp(k=2), loss_fn, x, t)
    >>> est.grads["0.weight"].shape
    torch.Size([8, 4])
    """

    k: int = 10
    solver: Literal["svd", "subspace", "shared"] = "shared"
    refresh: int = 50
    end: Literal["top", "bottom"] = "top"

    pools = True

    def __post_init__(self) -> None:
        check_count("WPerp(k)", self.k)
        check_count("WPerp(refresh)", self.refresh)
        if self.solver not in _SOLVERS:
            raise InputError(f"WPerp(solver): expected one of {sorted(_SOLVERS)}, found {self.solver!r}.")
        if self.end not in ("top", "bottom"):
            raise InputError(f"WPerp(end): expected 'top' or 'bottom', found {self.end!r}.")

    @property
    def reads(self) -> Literal["refresh", "always"]:  # type: ignore[override]
        return "refresh" if self.solver == "shared" else "always"

    def phase(self, count: int) -> str | None:
        if self.solver != "shared" or self.end == "bottom" or self.k > CAPTURABLE:
            return None  # these wait for the device
        return "refresh" if count % self.refresh == 0 else "step"

    def frame(self, view: SiteView) -> Frame:
        return _SOLVERS[self.solver](self, view)


def _svd(guess: WPerp, view: SiteView) -> Frame:
    """Dense, per sample: the definition."""
    matrices = view.W.matrix().expand(view.output.shape[0], -1, -1)  # (batch, m, d)
    rows = max(1, CHUNK // matrices[0].numel())
    find = _top_of if guess.end == "top" else _bottom_of
    return Columns(torch.cat([find(part, guess.k) for part in matrices.split(rows)]))


def _top_of(W: Tensor, k: int) -> Tensor:
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    k = min(k, S.shape[-1])
    real = S[:, :k] > S[:, :1] * max(W.shape[-2:]) * torch.finfo(W.dtype).eps
    return Vh[:, :k].mT * real[:, None]


def _bottom_of(W: Tensor, k: int) -> Tensor:
    Vh = torch.linalg.svd(W, full_matrices=True)[2]
    return Vh[:, -k:].mT


def _subspace(guess: WPerp, view: SiteView) -> Frame:
    """Per sample, by products: one dense product of the layer above with all samples' columns at a time."""
    if guess.end == "bottom":
        return _shared(guess, view)
    batch, d = view.output.shape
    k = min(guess.k, d)
    W, on_gpu = view.W, view.output.is_cuda
    if isinstance(W, ClosedForm) and W.m <= k:  # all of the row space
        return GatedBasis(orthonormal_columns(W.weight.t()), view.gate, batch, view.binary)
    width = min(d, max(k + OVERSAMPLE, GPU_BLOCK if on_gpu else 0))
    if view.due or "start" not in view.cache:
        keep(view.cache, "start", _shared_basis(W, width, view))
    start = view.cache["start"]
    start = (start if view.gate is None else view.gate[:, :, None] * start).expand(batch, d, width)
    if min(W.m, d) <= width:  # one product with the block spans the whole row space
        return Columns(batched_top_subspace(W.gram_columns, start, k, 2)[0])
    if d > DIRECT and on_gpu and isinstance(W, ClosedForm) and W.gate is not None:
        if view.due or "steep" not in view.cache:
            view.cache["steep"] = _steep(W, view.cache["start"], k)
        return Columns(_by_open_units(W, view.cache["start"], k, bool(view.cache["steep"])))
    if d <= DIRECT or not on_gpu:
        mix = view.cache.setdefault("mix", view.noise.normal((width, 2), start.dtype, start.device))
        return Columns(batched_top_subspace(W.gram_columns, start @ mix, k, _krylov_steps(d, k))[0])
    return Columns(chebyshev_top_subspace(W.gram_columns, start, k, degree=4, rounds=6)[0])


def _by_open_units(W: ClosedForm, start: Tensor, k: int, steep: bool) -> Tensor:
    small = Compact.of(W)
    return _on_open_units(small.product, small.index, small.gate, start, k=k, degrees=CAREFUL if steep else USUAL)


@graphed
def _on_open_units(
    product: Tensor, index: Tensor, gate: Tensor, start: Tensor, *, k: int, degrees: tuple[int, ...]
) -> Tensor:
    """On a GPU memory sets the pace: a product of a block with a sample's own small matrix reads only that."""
    small = Compact(product, index, gate)
    V, _ = steady_top_subspace(small.gram(), gate[:, :, None] * start[index], k, degrees)
    return small.scatter(V.permute(2, 0, 1)).permute(1, 2, 0)


def _steep(W: ClosedForm, start: Tensor, k: int) -> Tensor:
    """Does the filter have to be careful? 0-dim. Asked of the batch as a whole: the spectra of samples are alike."""
    values = torch.linalg.vector_norm(W.of_batch() @ start, dim=0).square().sort(descending=True).values
    return ((values[0] > STEEP * values[-1]) | (values[k - 1] > BULK * values[-1])).to(start.dtype)


def _krylov_steps(d: int, k: int) -> int:
    """Blocks of two columns for a projector error below 1e-2 where the spectrum has no gap (measured, k = 10)."""
    return min(-(-d // 2), max(k, round(5.6 * d ** (1 / 3) * max(1.0, k / 10))))


def _shared_basis(W: Upstream, width: int, view: SiteView) -> Tensor:
    """The batch's basis, with random columns where its rank is lower than `width`."""
    V = W.shared_basis(width, view.noise)
    empty = V.abs().amax(0) == 0
    return torch.where(empty, view.noise.normal(V.shape, V.dtype, V.device), V)


def _shared(guess: WPerp, view: SiteView) -> Frame:
    """One basis for the batch, bent into each sample's gate."""
    batch, d = view.output.shape
    k = min(guess.k, d)
    if guess.end == "bottom":
        return _null_frame(k, view)
    if view.due or "basis" not in view.cache:
        W = view.W
        keep(view.cache, "basis", W.shared_basis(min(k, W.m), view.noise, warm=view.cache.get("basis")))
    if view.cache["basis"].shape[1] == d and view.gate is not None and bool((view.cache["basis"] != 0).any(0).all()):
        return Open(view.gate != 0, view.output.dtype)  # all of the space: only the gate is left
    return GatedBasis(view.cache["basis"], view.gate, batch, view.binary, view.memo)


def _null_frame(k: int, view: SiteView) -> Frame:
    """k directions that `W̃` does not see.

    A unit whose gate is closed has singular value zero: any k directions among closed units are a bottom-k
    subspace. Where the gate does not close (tanh, GELU), the weakest directions of the batch are taken.
    """
    batch, d = view.output.shape
    if view.due or "basis" not in view.cache:
        if view.gate is not None and bool((view.gate == 0).any()):
            noise = view.noise.normal((d, k), view.output.dtype, view.output.device)
            keep(view.cache, "basis", orthonormal_columns(noise))
        else:
            full = view.W.shared_basis(d, view.noise)
            full = torch.linalg.qr(full + 1e-12 * torch.eye(d, dtype=full.dtype, device=full.device))[0]
            keep(view.cache, "basis", full[:, -k:])
    if view.gate is None or not bool((view.gate == 0).any()):
        return GatedBasis(view.cache["basis"], None, batch)
    return GatedBasis(view.cache["basis"], (view.gate == 0).to(view.output.dtype), batch)


_SOLVERS = {"svd": _svd, "subspace": _subspace, "shared": _shared}
