"""Top singular subspaces of one matrix, or of many that are known by their products."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.backends.cuda_graphs import CannotRecord, recording
from gradguess.linalg.factors import RIDGE, orthonormal_columns, orthonormal_rows, positive, sure_eigh

BLOCK = 2**22  # numbers that are converted at once
WARM = 3  # subspace iterations that bring a basis up to date


def top_right_singular_vectors(A: Tensor, k: int) -> Tensor:
    """The right singular vectors of the `k` largest singular values of one matrix, largest first.

    Exact, from the eigenvectors of the smaller of `AᵀA` and `AAᵀ`, scaled and in float64.
    Directions beyond `min(m, d)` or the numerical rank are zero columns. The rank counts the singular values
    above `max(m, d) eps` of the largest, and never below 1e-7 of it.

    Accuracy: float64 rounding over the relative gap to the next squared singular value.
    Cost: `m d min(m, d)` and an `eigh` of size `min(m, d)`. Waits for the device.

    Args:
        A: (m, d).
        k: how many directions, at least 1.

    Returns:
        V: (d, k).
    """
    m, d = A.shape
    rtol = max(max(m, d) * torch.finfo(A.dtype).eps, 1e-7)
    scale = positive(A.abs().amax())
    if m < d:
        values, U = sure_eigh(_gram(A, scale))
        top = U.flip(-1)[:, :k]
        V = orthonormal_columns(torch.cat([part.mT @ top for part in _in_float64(A, scale)]))
    else:
        values, V = sure_eigh(_gram(A.mT, scale))
        V = V.flip(-1)[:, :k]
    top = values.flip(-1)[:k]
    V = V * (top > rtol**2 * top[0])
    return F.pad(V, (0, k - V.shape[1])).to(A.dtype)


def _gram(A: Tensor, scale: Tensor) -> Tensor:
    """`AAᵀ / scale²` in float64."""
    G = A.new_zeros(len(A), len(A), dtype=torch.float64)
    for part in _in_float64(A, scale):
        G += part @ part.mT
    return G


def _in_float64(A: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """`A / scale` in float64, some columns at a time: the whole of a large matrix would need much memory."""
    for part in A.split(max(1, BLOCK // len(A)), dim=1):
        yield (part / scale).double()


def followed_bases(matrices: Sequence[Tensor], sizes: Sequence[int], warm: Sequence[Tensor | None]) -> list[Tensor]:
    """For each matrix the span of its `top_right_singular_vectors`, or that of an earlier basis brought up to date.

    Up to date by three subspace iterations: it is the span of `(AᵀA)³ V`, found along the shorter side of `A`, as
    `Aᵀ (AAᵀ)² A V` where it has few rows. They do not wait for the device, there is no Rayleigh–Ritz step, and those of
    matrices of one shape go side by side. An earlier basis that lacks directions, or is half as large as the matrix, is
    not followed: weak directions would be lost, and no time gained. Only a basis that is followed, or the whole row
    space, can be recorded; while a graph is recorded a basis lacks nothing.

    Args:
        matrices: each (m, d).
        sizes: how many directions of each, at least 1.
        warm: for each (d, k), the basis of an earlier search; None if there is none.

    Returns:
        for each `V`, (d, k).
    """
    found: dict[int, Tensor] = {}
    alike: dict[Hashable, list[int]] = {}
    for i, (A, k, V) in enumerate(zip(matrices, sizes, warm, strict=True)):
        if k == len(A) < A.shape[1]:
            found[i] = orthonormal_columns(A.t())
        elif V is not None and V.shape[1] == k and 2 * k <= min(A.shape) and is_full(V):
            alike.setdefault((A.shape, k, A.dtype, A.device), []).append(i)
        elif recording():
            raise CannotRecord
        else:
            found[i] = top_right_singular_vectors(A, k)
    for places in alike.values():
        for i, V in zip(places, _followed([matrices[i] for i in places], [warm[i] for i in places]), strict=True):
            found[i] = V.clone(memory_format=torch.contiguous_format)  # one that is kept would hold the others
    return [found[i] for i in range(len(matrices))]


def _followed(matrices: Sequence[Tensor], warm: Sequence[Any]) -> Tensor:
    """Bases (n, d, k) of n matrices of one shape, from those of an earlier search."""
    wide, transposed = len(matrices[0]) < matrices[0].shape[1], [A.mT for A in matrices]
    there, back = (matrices, transposed) if wide else (transposed, matrices)  # from the shorter side

    def rough(rows: Tensor) -> Tensor:
        return F.normalize(orthonormal_rows(rows)[0], dim=-1)  # a weak row is as long as others

    rows = torch.stack([V.mT for V in warm])  # (n, k, d)
    if wide:
        rows = rough(_times(rows, transposed))
    for _ in range(WARM - 1):
        rows = rough(_times(_times(rows, there), back))
    last = _times(rows, there)
    return orthonormal_rows(last if wide else _times(last, back))[0].mT


def _times(rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Each block of rows (n, k, ...) times its matrix: a matrix that is large is not copied to lie beside others."""
    return torch.stack([R @ A for R, A in zip(rows, matrices, strict=True)])


def is_full(V: Tensor) -> bool:
    """Whether the basis (d, k) has no empty column; assumed while a graph is recorded and nothing can be read."""
    return recording() or bool(V.any(0).all())


def batched_top_subspace(gram_product: Callable[[Tensor], Tensor], start: Tensor, blend: Tensor, rank: int) -> Tensor:
    """Top-k eigenvectors of `B` positive semi-definite matrices, known only by their products.

    All steps are the same whatever the numbers, and do not wait for the device. Where the k-th eigenvalue and the next
    one agree to 1e-4 of the largest, their vectors begin to mix.

    Args:
        gram_product, start, rank: as for `_top_block`.
        blend: (d, k), random numbers. V is `V Vᵀ blend` made orthonormal, however its span was found.

    Returns:
        V (B, d, k), orthonormal, with zero columns where a matrix has fewer directions.
    """
    rows, H = _top_block(gram_product, start, rank)
    chosen = _projector(H, blend.shape[1], _least(start)) @ (rows @ blend.double())
    return (rows.mT @ orthonormal_columns(chosen)).to(start.dtype)


def top_eigenvalues(gram_product: Callable[[Tensor], Tensor], start: Tensor, k: int, rank: int) -> Tensor:
    """Their k largest eigenvalues (B, k), largest first; zero beyond the rank. Waits for the device."""
    values = sure_eigh(_top_block(gram_product, start, rank)[1])[0].flip(-1)[:, :k].to(start.dtype)
    return F.pad(torch.where(values > _least(start) * values[:, :1], values, 0.0), (0, k - values.shape[1]))


def largest_eigenvalue(gram_product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """The largest eigenvalue of each of `B` matrices, (B,), by Lanczos iteration from `start` (B, d), every vector
    orthogonalised against all before. Waits for the device.

    Accuracy without a gap: its root is up to 3e-2 too small after 8 steps, and 2e-3 after 20.
    """
    rows = F.normalize(start, dim=-1)[:, None]
    for _ in range(steps - 1):
        more = gram_product(rows[:, -1])[:, None]
        more = more / positive(torch.linalg.vector_norm(more, dim=-1, keepdim=True))
        rows = orthonormal_rows(torch.cat([rows, more], 1))[0]
    return sure_eigh(_seen_from(rows, gram_product))[0][:, -1].to(start.dtype)


def _top_block(gram_product: Callable[[Tensor], Tensor], start: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Orthonormal vectors close to whose span the strongest eigenvectors of `B` matrices lie, and what these are on it.

    Three Chebyshev filters `T(2 G / β - 1)`, of degrees n, 2 n and 4 n with `n = ⌈3/8 d^(1/3)⌉`, small on [0, β] and
    growing above, with the least Rayleigh quotient as β. After two products a triangular matrix makes the vectors
    orthonormal, lest all turn to the strongest direction, and the block before gets the same for the recurrence.
    Accuracy of the top ten of p = 20, `‖P - P*‖_F` of √20, from the shared basis, in float32, on weights at
    initialisation with half of the units masked, without a gap: median and 90 % quantile 2e-6 and 3e-6 at d = 128 and
    256, 8e-6 and 7e-5 at 512. Far above the others, a direction costs digits: 2e-3 where its eigenvalue is 1e4 times.
    At 1e6 times float32 loses the others, whose columns are zero: take float64 or solver="svd" there.
    Cost: `7 n + 2` products of `p` vectors, and `3 p² d` operations in float64 for each to keep them orthonormal.
    Reference: Zhou et al. 2006, *Self-consistent-field calculations using Chebyshev-filtered subspace iteration*.

    Args:
        gram_product: (p, B, d) -> (p, B, d), `X -> W̃ᵀ W̃ X` with each sample's own `W̃`.
        start: (p, B, d), vectors to start from, of which none needs to be orthogonal to what is sought.
        rank: the most that a matrix may have. Where `p` is no less the result is exact but for rounding.

    Returns:
        the vectors as rows (B, p, d), some of them zero where there are not so many, and (B, p, p), both in float64.
    """
    p, _, d = start.shape
    X = (start if p == d else gram_product(start)).transpose(0, 1)
    if p < rank:
        n = max(2, math.ceil(0.375 * d ** (1 / 3)))
        (X,) = _conditioned(X)
        for degree in (n, 2 * n, 4 * n):
            Y = gram_product(X.transpose(0, 1)).transpose(0, 1)
            quotients = (X * Y).sum(-1) / positive(X.square().sum(-1))  # (B, p)
            half = positive(torch.maximum(quotients.amin(1), _least(X) * quotients.amax(1)) / 2)[:, None, None]
            X, before, twice = (Y / half).sub_(X), X, 2 / half
            for j in range(1, degree):
                Y = gram_product(X.transpose(0, 1)).transpose(0, 1)
                X, before = (Y * twice).sub_(X, alpha=2).sub_(before), X
                if j % 2 or j == degree - 1:
                    X, before = _conditioned(X, before)
    rows = orthonormal_rows(X.double())[0]
    return rows, _seen_from(rows.to(X.dtype), gram_product)


def _seen_from(rows: Tensor, gram_product: Callable[[Tensor], Tensor]) -> Tensor:
    """`Q G Qᵀ` of rows Q (B, p, d), in float64."""
    images, rows = gram_product(rows.transpose(0, 1)).transpose(0, 1).double(), rows.double()
    return (rows @ images.mT + images @ rows.mT) / 2


def _least(X: Tensor) -> float:
    """What rounding leaves of an eigenvalue that is zero, as a share of the largest: vectors (..., d)."""
    return 10 * X.shape[-1] ** 0.5 * torch.finfo(X.dtype).eps


def _conditioned(X: Tensor, *others: Tensor) -> list[Tensor]:
    """Rows `X` (B, p, d) made orthonormal in Gram–Schmidt order, and others with the same done to them. Rows that
    depend on those before become arbitrary ones of the span.
    """
    wide = [Z.double() for Z in (X, *others)]
    C = torch.bmm(wide[0], wide[0].mT)
    C.diagonal(dim1=-2, dim2=-1).mul_(1 + RIDGE).add_(1e-60)  # there may be rows of zeros
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    inverse = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(C)[0], eye, upper=False)
    return [torch.bmm(inverse, Z).to(X.dtype) for Z in wide]


def _projector(H: Tensor, k: int, least: float) -> Tensor:
    """A matrix with the span of the k strongest eigenvectors of each `H` (B, p, p), positive semi-definite; of fewer
    where other eigenvalues are below `least` of the largest.

    With eigenvalues in [0, 1], squaring lowers the trace and its mirror image, `1 - (1 - H)²`, raises it. Either is
    taken so that the trace goes to k: the first k eigenvalues go to one, the others to zero, by sixty steps where they
    lie 1e-4 apart. Equal ones at this border stay in between. There a high power leaves the strong directions alone,
    and a ten-thousandth of the others chooses among equals.
    Reference: Niklasson 2002, *Expansion algorithm for the density matrix*.
    """
    P = 0.99 * H / positive(H.abs().sum(-1).amax(-1))[:, None, None]  # squares of what rounding leaves above one grow
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    root = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(P + least * eye)[0], eye, upper=False)
    seen = eye - least * (root.mT @ root)
    for _ in range(5):  # by `3 x² - 2 x³` to zero or one
        square = torch.bmm(seen, seen)
        seen = 3 * square - 2 * torch.bmm(square, seen)
    wanted, one = seen.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_max(k), P.new_ones(())
    border = wanted - 1e-6, wanted + 1e-6  # at the end both by turns
    for step in range(60):
        if step % 20 == 0:  # what rounding left of the others has doubled with the weakest
            P = seen @ P @ seen
        trace = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        P = torch.lerp(P, torch.bmm(P, P), torch.copysign(one, trace - border[step % 2]).view(-1, 1, 1))
    power = P
    for _ in range(10):
        power = torch.bmm(power, power)
    return power + 1e-4 * P
