"""W⊥: guess inside the top-k right singular subspace of the Jacobian above (the paper's method)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradguess.errors import check_choice, check_count
from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Columns, Frame, GatedBasis, OpenGate
from gradguess.jacobian import GatedLinear, Jacobian
from gradguess.linalg import batched_top_subspace, followed_bases, is_full, orthonormal_columns, sure_eigh

CHUNK = 1 << 26  # numbers in a dense batch of Jacobians that are decomposed at once
OVERSAMPLE = 6  # extra columns that make the subspace iteration converge faster


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
            "subspace": every sample's own `V_k`, to a projector error of a few 1e-3, by products with the layer above,
            which all samples share.
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
    solver: Literal["svd", "subspace", "shared"] = "shared"
    refresh: int = 50
    end: Literal["top", "bottom"] = "top"

    multiplies = False

    def __post_init__(self) -> None:
        check_count("WPerp(k)", self.k)
        check_count("WPerp(refresh)", self.refresh)
        check_choice("WPerp(solver)", self.solver, tuple(_SOLVERS))
        check_choice("WPerp(end)", self.end, ("top", "bottom"))

    @property
    def _solver(self) -> _Solver:
        if self.solver == "svd":
            return _SOLVERS["svd"]
        return _Null() if self.end == "bottom" else _SOLVERS[self.solver]

    @property
    def reads(self) -> Literal["search", "frame"]:  # type: ignore[override]
        return "search" if self.solver == "shared" else "frame"

    @property
    def searches(self) -> bool:  # type: ignore[override]
        return self.solver != "svd"

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return isinstance(self._solver, _Shared)

    def search(self, view: SiteView) -> dict[str, Tensor]:
        return self._solver.search(self, view)

    def search_all(self, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        if type(self).search is not WPerp.search:  # a subclass has its own
            return super().search_all(views)
        return self._solver.search_all(self, views)

    def frame(self, view: SiteView) -> Frame:
        return self._solver.frame(self, view)


class _Solver:
    """One way to find `V_k`."""

    def search(self, guess: WPerp, view: SiteView) -> dict[str, Tensor]:
        return {}

    def search_all(self, guess: WPerp, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        return [self.search(guess, view) for view in views]

    def frame(self, guess: WPerp, view: SiteView) -> Frame:
        raise NotImplementedError


class _Svd(_Solver):
    """Dense, per sample: the definition."""

    def frame(self, guess: WPerp, view: SiteView) -> Frame:
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


class _Shared(_Solver):
    """One basis for the batch, multiplied by each sample's gate and made orthonormal."""

    def search(self, guess: WPerp, view: SiteView) -> dict[str, Tensor]:
        return self.search_all(guess, [view])[0]

    def search_all(self, guess: WPerp, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        every = [view.W for view in views]
        sizes = [min(guess.k, W.d, W.m) for W in every]
        matrices = [W.of_batch(k, view.noise) for view, W, k in zip(views, every, sizes, strict=True)]
        return [{"basis": V} for V in followed_bases(matrices, sizes, [view.kept.get("basis") for view in views])]

    def frame(self, guess: WPerp, view: SiteView) -> Frame:
        batch, d = view.output.shape
        V = view.found("basis")
        if V.shape[1] == d and view.gate is not None and is_full(V):
            return OpenGate(view.gate != 0, view.output.dtype)  # all of the space: only the gate is left
        return GatedBasis(V, view.gate, batch, view.binary)


class _Null(_Solver):
    """k directions that `W̃` does not see.

    A unit whose gate is closed has singular value zero: any k directions among closed units are a bottom-k
    subspace. Where the gate does not close (tanh, GELU), the weakest directions of the batch are taken.
    """

    def search(self, guess: WPerp, view: SiteView) -> dict[str, Tensor]:
        s, d = view.output, view.output.shape[1]
        k = min(guess.k, d)
        if _closes(view.gate):
            return {"basis": orthonormal_columns(view.noise.normal((d, k), s.dtype, s.device))}
        full = view.W.shared_basis(d, view.noise)
        full = torch.linalg.qr(full + 1e-12 * torch.eye(d, dtype=full.dtype, device=full.device))[0]
        return {"basis": full[:, -k:]}

    def frame(self, guess: WPerp, view: SiteView) -> Frame:
        V, batch = view.found("basis"), len(view.output)
        if view.gate is None or not _closes(view.gate):
            return GatedBasis(V, None, batch)
        return GatedBasis(V, (view.gate == 0).to(view.output.dtype), batch)


def _closes(gate: Tensor | None) -> bool:
    return gate is not None and bool((gate == 0).any())


class _Subspace(_Solver):
    """Every sample's own, by products: each multiplies the layer above with the columns of all samples at once."""

    def search(self, guess: WPerp, view: SiteView) -> dict[str, Tensor]:
        W, k, width = view.W, *_sizes(guess, view)
        if _keeps_all(W, k):
            return _SHARED.search(guess, view)
        if _is_row_space(W, k) or _is_narrow(W, width):
            return {}
        found = {"start": _filled_basis(W, width, view)}
        if min(W.m, W.d) > width:
            mix = view.noise.normal((width, 2), view.output.dtype, view.output.device)
            found["mix"] = view.kept.get("mix", mix)
        return found

    def frame(self, guess: WPerp, view: SiteView) -> Frame:
        W, (batch, d) = view.W, view.output.shape
        k, width = _sizes(guess, view)
        if _keeps_all(W, k):
            return _SHARED.frame(guess, view)
        if _is_row_space(W, k):
            assert isinstance(W, GatedLinear)
            return GatedBasis(orthonormal_columns(W.weight.t()), view.gate, batch, view.binary)
        if _is_narrow(W, width):
            assert isinstance(W, GatedLinear)
            return Columns(_from_rows(W, k).expand(batch, -1, -1))
        basis = view.found("start")
        start = (basis if view.gate is None else view.gate[:, :, None] * basis).expand(batch, d, -1)
        if min(W.m, d) <= width:  # one product with the block spans the whole row space
            return Columns(batched_top_subspace(W.gram_columns, start, k, 2)[0])
        return Columns(batched_top_subspace(W.gram_columns, start @ view.found("mix"), k, _krylov_steps(d, k))[0])


def _sizes(guess: WPerp, view: SiteView) -> tuple[int, int]:
    """How many directions are wanted, and of how many columns the first block is."""
    d = view.output.shape[1]
    k = min(guess.k, d)
    return k, min(d, k + OVERSAMPLE)


def _keeps_all(W: Jacobian, k: int) -> bool:
    """Are there no more than k directions? Then a basis of the batch is every sample's own."""
    return isinstance(W, GatedLinear) and W.m >= W.d == k


def _is_narrow(W: Jacobian, width: int) -> bool:
    """Has the layer above so few outputs that the Gram matrix of its rows is small?"""
    return isinstance(W, GatedLinear) and W.m < W.d and W.m <= width


def _from_rows(W: GatedLinear, k: int) -> Tensor:
    """`V_k = W̃ᵀ U_k S_k⁻¹` from the eigenvectors of `W̃W̃ᵀ = U S² Uᵀ`: (batch or 1, d, k); zero beyond the rank."""
    rows = W.matrix()
    values, U = sure_eigh(rows @ rows.mT)
    values, U = values.flip(-1)[:, None, :k], U.flip(-1)[..., :k]
    real = values > values[..., :1] * 10 * torch.finfo(rows.dtype).eps  # of squares
    return orthonormal_columns(rows.mT @ U * real)


def _is_row_space(W: Jacobian, k: int) -> bool:
    """Do k directions span the whole row space of the layer above?"""
    return isinstance(W, GatedLinear) and W.m <= k


def _krylov_steps(d: int, k: int) -> int:
    """Blocks of two columns for a projector error below 1e-2 where the spectrum has no gap (measured, k = 10)."""
    return min(-(-d // 2), max(k, round(5.6 * d ** (1 / 3) * max(1.0, k / 10))))


def _filled_basis(W: Jacobian, width: int, view: SiteView) -> Tensor:
    """The batch's basis, with random columns where its rank is lower than `width`."""
    V = W.shared_basis(width, view.noise)
    empty = V.abs().amax(0) == 0
    return torch.where(empty, view.noise.normal(V.shape, V.dtype, V.device), V)


_SHARED = _Shared()
_SOLVERS: dict[str, _Solver] = {"svd": _Svd(), "subspace": _Subspace(), "shared": _SHARED}
