"""Top singular subspaces of one matrix, or of many that are known by their products."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.backends.cuda_graphs import CannotRecord, recording
from gradguess.linalg.factors import orthonormal_columns, orthonormal_rows, positive, sure_eigh

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
    return _pad_columns(V, k).to(A.dtype)


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


def batched_top_subspace(
    gram_product: Callable[[Tensor], Tensor], start: Tensor, k: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """Top-k eigenvectors of `B` positive semi-definite matrices, known only by their products.

    Rayleigh–Ritz in the block Krylov space `[X, G X, ..., G^(iterations - 1) X]`, its basis fully
    orthogonalised (block Lanczos). Where the space ends early (low rank, repeated eigenvalues, a start that
    has converged) fixed random directions continue it.

    Accuracy, `‖P - P*‖₂` for k = 10 and `p = 2` random columns: on weights at initialisation with half the
    units masked, which have no gap, about `5.6 d^(1/3)` iterations give a median below 1e-3 and a 90 %
    quantile below 5e-3 (28 at d = 128, 44 at 512, 56 at 1024); on weights with a rank-10 part whose
    eigenvalues are five times those of the noise 10 iterations give 2e-4. Narrow blocks need the fewest
    products: at equal error, `p = 10` takes 1.5 times as many columns, a Chebyshev-filtered block of 20 six
    times and plain subspace iteration ten. From an old basis with little drift, `p = 2 k` columns and 3 to
    4 iterations do; two random combinations of a basis shared by the batch, gated, start a little better than noise.
    The largest eigenvalue alone, `p = 1`: its root is up to 3e-2 too small after 8 iterations without a gap, and
    2e-3 after 20.
    Cost: one product of `p` columns an iteration; `4 d p² iterations²` operations to orthogonalise;
    `B` eigenvalue problems of size `s = p iterations`; `B s (d + s)` numbers of memory. Waits for the device.
    Reference: Golub and Underwood 1977, *The block Lanczos method for computing eigenvalues*.

    Args:
        gram_product: (B, d, p) -> (B, d, p), `X -> W̃ᵀ W̃ X` with each sample's own `W̃`.
        start: (B, d, p), columns to start from: random, or the basis of an earlier step.
        k: how many directions, at least 1.
        iterations: products with a block of `p` columns; `p * iterations` should be well above `k`.

    Returns:
        V (B, d, k), orthonormal, largest eigenvalue first, and the eigenvalues (B, k); zero beyond the rank.
    """
    batch, d, p = start.shape
    iterations = min(iterations, -(-d // p))
    X, _ = orthonormal_rows(start.mT.contiguous())  # (B, p, d): vectors are rows throughout
    noise = _fixed_noise(iterations, p, start)
    Q = X.new_zeros(batch, p * iterations, d)
    H = X.new_zeros(batch, p * iterations, p * iterations)
    for j in range(iterations):
        new = slice(j * p, (j + 1) * p)
        Q[:, new] = X
        Y = gram_product(X.mT).mT
        # once along the two last blocks, where all but rounding lies, and once along all of them
        for old in (slice(max(j - 1, 0) * p, (j + 1) * p), slice(0, (j + 1) * p)):
            along = Y @ Q[:, old].mT
            H[:, new, old] += along
            Y = Y - along @ Q[:, old]
        if j + 1 < iterations:
            scale = H.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
            X = _next_block(Y, Q[:, old], scale, noise[j + 1])
    return _ritz_pairs(Q, H, k)


def _ritz_pairs(Q: Tensor, H: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The top-k Ritz pairs from orthonormal rows `Q` (B, s, d) and `H = Q G Qᵀ` (its lower triangle).

    V (B, d, k), largest eigenvalue first, and the eigenvalues (B, k); zero beyond the rank. Each vector points along
    the first row, so that its sign does not hang on rounding.
    """
    scale = positive(H.abs().amax((-2, -1), keepdim=True))
    values, Z = sure_eigh(H / scale)
    Z = torch.where(Z[..., :1, :] < 0, -Z, Z)
    values = values.flip(-1)[..., :k]
    floor = 10 * Q.shape[-1] ** 0.5 * torch.finfo(Q.dtype).eps * values[..., :1]
    values = torch.where(values > floor, values, 0.0)
    V = (Z.flip(-1)[..., :k].mT @ Q).mT * (values[..., None, :] > 0)
    return _pad_columns(V, k), _pad_columns(values * scale[..., 0], k)


def _pad_columns(V: Tensor, k: int) -> Tensor:
    """`V` with zero columns on the right until there are `k`."""
    return F.pad(V, (0, k - V.shape[-1]))


def _fixed_noise(blocks: int, p: int, like: Tensor) -> Tensor:
    """White noise (blocks, p, d), the same in every call and for every sample."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(blocks, p, like.shape[-2], generator=generator, dtype=like.dtype, device=like.device)


def _next_block(residual: Tensor, basis: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """Orthonormal rows (B, p, d) that continue the basis (B, j, d): the residual, or noise where it vanished.

    It has vanished when it is rounding against the `scale` (B, 1, 1) of the operator. Scaling up what little
    is left of a vector scales up its rounding along the basis: then that is removed again.
    """
    tiny = 10 * basis.shape[-1] ** 0.5 * torch.finfo(basis.dtype).eps
    size = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
    rows = torch.where(size > tiny * scale, residual / positive(size), noise / noise.shape[-1] ** 0.5)
    rows, left = orthonormal_rows(rows)
    if (torch.minimum(left, size / positive(scale)) > 1e-2).all():
        return rows
    for least in (tiny, 0.5):  # what loses half its norm the second time was rounding the first time
        rows = rows - (rows @ basis.mT) @ basis
        rows = rows * (torch.linalg.vector_norm(rows, dim=-1, keepdim=True) > least)
        rows, _ = orthonormal_rows(rows)
    return rows
