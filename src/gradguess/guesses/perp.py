"""W⊥: guess inside the top-k right singular subspace of the Jacobian above (the paper's method)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradguess.errors import check_choice, check_count
from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Columns, Frame, GatedBasis, OpenGate
from gradguess.jacobian import Dense, GatedLinear
from gradguess.linalg import (
    batched_top_subspace,
    followed_bases,
    is_full,
    orthonormal_columns,
)

Solver = Literal["svd", "subspace", "shared"]
CHUNK = 1 << 26  # numbers in a dense batch of Jacobians that are decomposed at once
OVERSAMPLE = 10  # as many vectors beyond k as k, or so many: the more, the sooner the others converge


@dataclass(frozen=True)
class WPerp(Guess):
    """Directions from the `k` strongest (or weakest) right singular vectors `V_k` of `W̃ = U S Vᵀ`.

    Direction `y = V_k U_kᵀ ε`, in law `V_k z` with `z ~ N(0, I_k)`. Covariance `V_k V_kᵀ`, a projector.
    Bias `(V_k V_kᵀ - I) g`: the part of the gradient outside the subspace. Variance that of a k-dimensional guess,
    whatever the width. Paper: eqs. (7) and (8). A `k` above the rank gives the whole row space.

    Args:
        k: dimension of the guessing space.
        solver: how `V_k` is found.
            "svd", the paper's definition and the reference: a dense SVD for every sample.
            "subspace": every sample's own `V_k`, to a projector error of 1e-5, by products with the layer above that
            all samples share.
            "shared", the default: one basis `V` for the batch, found every `refresh` steps, then multiplied by each
            sample's gate and made orthonormal: `D V C^{-½} z` with `C = Vᵀ D² V`. Its covariance is an exact rank-k
            projector inside the image of the gate. It is not the sample's own top-k subspace, which the paper uses.
            It costs about as much as Wᵀ.
        refresh: steps between two searches for the shared basis, or for the first vectors of "subspace".
        end: "top" for the k largest singular values, "bottom" for the k smallest (the paper's control).

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WPerp(k=2), loss_fn, x, t)
    >>> est.grads["0.weight"].shape
    torch.Size([8, 4])
    """

    k: int = 10
    solver: Solver = "shared"
    refresh: int = 50
    end: Literal["top", "bottom"] = "top"

    multiplies = False

    def __post_init__(self) -> None:
        check_count("WPerp(k)", self.k)
        check_count("WPerp(refresh)", self.refresh)
        check_choice("WPerp(solver)", self.solver, get_args(Solver))
        check_choice("WPerp(end)", self.end, ("top", "bottom"))

    @property
    def reads(self) -> Literal["search", "frame"]:  # type: ignore[override]
        return "search" if self.solver == "shared" else "frame"

    @property
    def searches(self) -> bool:  # type: ignore[override]
        return self.solver != "svd"

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return self.solver != "svd" and self.end == "top"

    def search(self, view: SiteView) -> dict[str, Tensor]:
        if self.solver == "svd":
            return {}
        if self.end == "bottom":
            return {"basis": _weakest(view, self.k)}
        return _shared_bases([view], self.k)[0] if self.solver == "shared" else _start(view, self.k)

    def search_all(self, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        if (self.solver, self.end) == ("shared", "top") and type(self).search is WPerp.search:  # a subclass has its own
            return _shared_bases(views, self.k)
        return super().search_all(views)

    def frame(self, view: SiteView) -> Frame:
        if self.solver == "svd":
            return Columns(_by_svd(view, self.k, _top_of if self.end == "top" else _bottom_of))
        if self.end == "bottom":
            closed = _closed(view.gate)
            return GatedBasis(view.found("basis"), closed, len(view.output), binary=True)
        return _gated(view.found("basis"), view) if self.solver == "shared" else _each_subspace(view, self.k)


# --- "svd": dense, per sample, the definition (eqs. (7) and (8)) ----------------------------------------------


def _by_svd(view: SiteView, k: int, find: Callable[[Tensor, int], Tensor]) -> Tensor:
    matrices = view.W.matrix().expand(view.output.shape[0], -1, -1)  # (batch, m, d)
    return torch.cat([find(part, k) for part in matrices.split(max(1, CHUNK // matrices[0].numel()))])


def _top_of(W: Tensor, k: int) -> Tensor:
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    k = min(k, S.shape[-1])
    real = S[:, :k] > S[:, :1] * max(W.shape[-2:]) * torch.finfo(W.dtype).eps
    return Vh[:, :k].mT * real[:, None]


def _bottom_of(W: Tensor, k: int) -> Tensor:
    Vh = torch.linalg.svd(W, full_matrices=True)[2]
    return Vh[:, -k:].mT


# --- "shared": one basis for the batch, multiplied by each sample's gate and made orthonormal -------------------


def _shared_bases(views: Sequence[SiteView], k: int) -> list[dict[str, Tensor]]:
    every = [view.W for view in views]
    sizes = [min(k, W.d, W.m) for W in every]
    matrices = [W.of_batch(size, view.noise) for view, W, size in zip(views, every, sizes, strict=True)]
    return [{"basis": V} for V in followed_bases(matrices, sizes, [view.kept.get("basis") for view in views])]


def _gated(V: Tensor, view: SiteView) -> Frame:
    """The frame of a basis that all samples share but for the gate."""
    batch, d = view.output.shape
    if V.shape[1] == d and view.gate is not None and is_full(V):
        return OpenGate(view.gate != 0, view.output.dtype)  # all of the space: only the gate is left
    return GatedBasis(V, view.gate, batch, view.binary)


# --- end="bottom": k directions that `W̃` does not see -----------------------------------------------------------


def _weakest(view: SiteView, k: int) -> Tensor:
    """A basis whose part in each sample's closed units is a bottom-k subspace: such a unit has singular value zero.

    Where the gate does not close (tanh, GELU), the weakest directions of the batch are taken.
    """
    s, d = view.output, view.output.shape[1]
    k = min(k, d)
    if _closed(view.gate) is not None:
        return orthonormal_columns(view.noise.normal((d, k), s.dtype, s.device))
    full = view.W.shared_basis(d, view.noise)
    return torch.linalg.qr(full + 1e-12 * torch.eye(d, dtype=full.dtype, device=full.device))[0][:, -k:]


def _closed(gate: Tensor | None) -> Tensor | None:
    """One where a gate is closed, else zero; None where none is."""
    return (gate == 0).to(gate.dtype) if gate is not None and bool((gate == 0).any()) else None


# --- "subspace": every sample's own, by products of the layer above with a block of vectors of each sample ----------


def _start(view: SiteView, k: int) -> dict[str, Tensor]:
    """The batch's basis with a tenth of noise, so that no direction is missed, and what chooses among bases."""
    d, noise = view.output.shape[1], view.noise
    V = view.W.shared_basis(min(d, k + max(k, OVERSAMPLE)), noise)
    start = V + noise.normal(V.shape, V.dtype, V.device) / (10 * d**0.5)
    return {"start": start, "blend": noise.normal((d, min(k, d)), V.dtype, V.device)}


def _each_subspace(view: SiteView, k: int) -> Frame:
    W, s = view.W, view.output
    if isinstance(W, GatedLinear) and min(W.m, W.d) <= k:  # the whole row space, shared but for the gate
        return _gated(followed_bases([W.weight], [min(W.m, W.d)], [None])[0], view)
    if not isinstance(W, GatedLinear) and s.numel() * W.m <= CHUNK:
        W = Dense(W.matrix())  # a product with a graph is a pass for each vector
    start = view.found("start").t()[:, None] * (torch.ones_like(s) if view.gate is None else view.gate)
    return Columns(batched_top_subspace(W.gram, start, view.found("blend"), min(W.m, W.d)))
