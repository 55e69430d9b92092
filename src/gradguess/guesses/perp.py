"""W⊥: guess inside the top-k right singular subspace of the Jacobian above (the paper's method)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gradguess.errors import InputError, check_choice, check_count
from gradguess.guesses.base import Guess, SiteView, StaleBasis
from gradguess.guesses.frames import Columns, Frame, GatedBasis, OpenGate, Separable
from gradguess.jacobian import Dense, GatedLinear
from gradguess.layers.positions import Pattern
from gradguess.linalg import (
    batched_top_subspace,
    followed_bases,
    is_full,
    orthonormal_columns,
)

Solver = Literal["svd", "subspace", "shared", "separable"]
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
            "separable": one basis `P` of positions and one `V` of features for the batch, `y = P Z Vᵀ` with at most k
            numbers in `Z`, at sites with positions (tokens, pixels); "shared" elsewhere. Directions and inputs are
            kept as their few factors, so that the gradient of a linear layer or a norm needs no third product and no
            stored activation. It is the top of the Jacobian in positions and in features, without the sample's gate.
        refresh: steps between two searches for the shared bases, or for the first vectors of "subspace".
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
        if self.solver == "separable" and self.end == "bottom":
            raise InputError("WPerp(solver='separable'): expected end='top', found 'bottom'. Use solver='shared'.")

    @property
    def reads(self) -> Literal["search", "frame"]:  # type: ignore[override]
        return "search" if self._shares else "frame"

    @property
    def _shares(self) -> bool:
        return self.solver in ("shared", "separable")

    @property
    def searches(self) -> bool:  # type: ignore[override]
        return self.solver != "svd"

    @property
    def rows(self) -> int:  # type: ignore[override]
        return 16 if self.solver == "separable" else 256  # where each row has all positions and all features

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return self.solver != "svd" and self.end == "top"

    def search(self, view: SiteView) -> dict[str, Tensor]:
        if self.solver == "svd":
            return {}
        if self.end == "bottom":
            return {"basis": _weakest(view, self.k)}
        return self.search_all([view])[0] if self._shares else _start(view, self.k)

    def search_all(self, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        own = type(self).search is not WPerp.search  # of a subclass
        if own or not self._shares or self.end == "bottom":
            return super().search_all(views)
        shared = iter(_shared_bases([view for view in views if not self._separates(view.pattern)], self.k))
        separable = iter(_separable_bases([view for view in views if self._separates(view.pattern)], self.k))
        return [next(separable if self._separates(view.pattern) else shared) for view in views]

    def _separates(self, pattern: Pattern) -> bool:
        return self.solver == "separable" and pattern.features > 0

    def reads_gate(self, pattern: Pattern) -> bool:
        return not self._separates(pattern)

    def frame(self, view: SiteView) -> Frame:
        if self.solver == "svd":
            return Columns(_by_svd(view, self.k, _top_of if self.end == "top" else _bottom_of))
        if self._separates(view.pattern):
            P, V = _factors(view)
            if P is None or V is None:
                raise StaleBasis
            return Separable(P, V, view.pattern, len(view.output))
        if self.end == "bottom":
            closed = _closed(view.gate)
            return GatedBasis(view.found("basis"), closed, len(view.output), binary=True)
        return _gated(view.found("basis"), view) if self._shares else _each_subspace(view, self.k)


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


# --- "separable": one basis of positions and one of features ----------------------------------------------------


def _separable_bases(views: Sequence[SiteView], k: int) -> list[dict[str, Tensor]]:
    """The top subspaces of the two unfoldings of the Jacobians' rows, each inside of the other's, in turns."""
    rows = [view.pattern.tokens(W.of_batch(min(k, W.d, W.m), view.noise)) for view in views for W in [view.W]]
    a = [min(math.isqrt(k), R.shape[1]) for R in rows]
    v = [min(k // size, R.shape[2]) for size, R in zip(a, rows, strict=True)]
    a = [min(k // size, R.shape[1]) for size, R in zip(v, rows, strict=True)]  # more positions than √k, of few features
    P, V = ([_factors(view)[i] for view in views] for i in (0, 1))
    for _ in range(1 if all(basis is not None for basis in V) else 2):  # those of an earlier search are near
        inside = [R.mT if basis is None else (R @ basis).mT for R, basis in zip(rows, V, strict=True)]
        P = followed_bases([part.flatten(0, 1) for part in inside], a, P)
        V = followed_bases([(basis.t() @ R).flatten(0, 1) for R, basis in zip(rows, P, strict=True)], v, V)
    return [{"positions": p, "features": f} for p, f in zip(P, V, strict=True)]


def _factors(view: SiteView) -> tuple[Any, Any]:
    """`P` and `V` as they were kept. None in the place of one that is missing, or of another size than the site now."""
    kept = view.kept.get("positions"), view.kept.get("features")
    sizes = view.pattern.tokens(view.output).shape[1:]
    P, V = (B if B is not None and len(B) == n else None for B, n in zip(kept, sizes, strict=True))
    return P, V


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
