"""Bases, triangular factors and matrix polynomials: pure functions on tensors, batched.

Everything here is deterministic given its arguments, writes to none of them, and keeps their dtype and
device. Dependent, zero and missing directions never raise and never give NaN: they come back as zero
columns, so that a caller who draws `V z` draws from the directions that exist.

A function that waits for the device (an eigenvalue routine does) says so; the others can be captured in a
CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradguess import kernels

__all__ = [
    "batched_top_subspace",
    "chebyshev_top_subspace",
    "largest_singular",
    "newton_schulz",
    "orthonormal_columns",
    "polynomial",
    "semidefinite_cholesky",
    "steady_top_subspace",
    "top_right_singular_vectors",
    "triangular_apply",
]

ROUGH = 2  # sweeps of Jacobi's method where eigenvectors are only a good basis
FINE = 4  # and where they are the result, of a matrix that is close to diagonal

Product = Callable[[Tensor], Tensor]
Eigh = Callable[[Tensor], tuple[Tensor, Tensor]]


def semidefinite_cholesky(C: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
    """Lower factor of positive semi-definite matrices that may be singular, or zero.

    A column whose remaining pivot is at most `rtol` times the largest diagonal entry of its matrix depends on
    the columns before it: there `L` gets a one on the diagonal and zeros below, and `alive` is False. For
    `C = YᵀY` the columns of `Y L^{-T}` are then orthonormal where alive, and the negligible residual
    elsewhere; the caller zeroes it with the mask: `Y L^{-T} (alive z)` has an exact projector as covariance.
    Where every column is alive, `L Lᵀ = C`.

    Accuracy: `QᵀQ` is off by about `eps` over the smallest relative pivot kept, so by 1e-2 at the very worst
    with the default `rtol`, `100 k eps`; 1e-6 (float32) for columns of ordinary conditioning.
    Cost: `k³/3` operations per matrix. On the CPU LAPACK factors the batch, and only matrices with a dropped
    pivot go through the loop; on a GPU one kernel does it all (`gradguess.kernels`), and where that cannot be used
    the loop runs `k` times over the batch. Neither waits for the device.

    Args:
        C: (B, k, k), symmetric.
        rtol: relative size of a pivot that counts as zero.

    Returns:
        `L` (B, k, k) and `alive` (B, k), bool.
    """
    k = C.shape[-1]
    rtol = 100 * k * torch.finfo(C.dtype).eps if rtol is None else rtol
    floor = rtol * C.diagonal(dim1=-2, dim2=-1).amax(-1)  # (B,)
    if kernels.usable(C, k):
        return kernels.cholesky(C, floor)
    if C.device.type != "cpu":
        return _dropping_cholesky(C, floor)
    L, info = torch.linalg.cholesky_ex(C)
    alive = L.diagonal(dim1=-2, dim2=-1).square() > floor[:, None]
    whole = alive.all(-1) & (info == 0)
    if whole.all():
        return L, alive
    (rest,) = torch.where(~whole)
    L[rest], alive[rest] = _dropping_cholesky(C[rest], floor[rest])
    return L, alive


def _dropping_cholesky(C: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Right-looking Cholesky, batch innermost, that drops pivots not above `floor` (B,)."""
    rest = C.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)  # (k, k, B), becomes L
    for j in range(C.shape[-1]):
        pivot = rest[j, j]
        rest[j:, j].mul_(torch.where(pivot > floor, pivot.rsqrt(), 0.0))
        column = rest[j + 1 :, j]
        rest[j + 1 :, j + 1 :].addcmul_(column[:, None], column[None], value=-1)
    L = rest.permute(2, 0, 1).tril()
    diagonal = L.diagonal(dim1=-2, dim2=-1)
    alive = diagonal > 0
    diagonal.add_(~alive)
    return L, alive


def triangular_apply(L: Tensor, z: Tensor, transpose: bool = True) -> Tensor:
    """`L^{-T} z` (or `L^{-1} z`) for every matrix of a batch and every right-hand side.

    Cost: `k²` operations per right-hand side.

    Args:
        L: (B, k, k), lower triangular, as `semidefinite_cholesky` returns it.
        z: (B, k) or (n, B, k).
        transpose: solve with `Lᵀ` instead of `L`.

    Returns:
        the solutions, of the shape of `z`.
    """
    columns = z[..., None] if z.ndim == 2 else z.permute(1, 2, 0)  # (B, k, 1 or n)
    matrix = L.mT if transpose else L
    x: Tensor = torch.linalg.solve_triangular(matrix, columns, upper=transpose)
    return x[..., 0] if z.ndim == 2 else x.permute(2, 0, 1)


def orthonormal_columns(A: Tensor, rtol: float | None = None) -> Tensor:
    """Orthonormal bases of the column spans, in Gram–Schmidt order; zero columns where a column is dependent.

    `QᵀA` is upper triangular with a positive diagonal, so that Gaussian columns give Haar-distributed ones. A
    column is dropped when what is left of it after the columns before it is below `rtol` of the largest
    column; the columns after it are not orthogonalised against rounding, as plain QR would do.

    Accuracy: `|QᵀQ - I| ~ k eps`, and the span that of Gram–Schmidt without the dropped columns. `rtol` is
    `10 (k + √d) eps` by default.
    Cost: `4 d k²` operations by LAPACK on the CPU, where only matrices with a dropped column go on to Cholesky QR;
    three passes of Cholesky QR, `12 d k²`, elsewhere, without waiting for the device.
    Reference: Yamamoto et al. 2015, *Roundoff error analysis of the CholeskyQR2 algorithm*.

    Args:
        A: (B, d, k) or (d, k); fastest where it is the transpose of a contiguous (B, k, d).

    Returns:
        Q, of the shape of `A`, the transpose of a contiguous tensor.
    """
    if A.ndim == 2:
        return orthonormal_columns(A[None], rtol)[0]
    rows, _ = _orthonormal_rows(A.mT.contiguous(), rtol)
    return rows.mT


def _orthonormal_rows(R: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
    """`orthonormal_columns` of vectors that lie as rows (B, k, d), and what was left of each (B, k, 1)."""
    k, d = R.shape[-2:]
    rtol = 10 * (k + d**0.5) * torch.finfo(R.dtype).eps if rtol is None else rtol
    if R.device.type != "cpu" or k > d:
        return _cholesky_rows(R, rtol)
    Q, T = torch.linalg.qr(R.mT)
    diagonal = T.diagonal(dim1=-2, dim2=-1)[..., None]
    left = diagonal.abs() / _positive(torch.linalg.vector_norm(T, dim=-2).amax(-1)[:, None, None])
    rows = Q.mT * diagonal.sign()
    whole = (left > rtol).all(-2)[:, 0]
    if not whole.all():
        (rest,) = torch.where(~whole)
        rows[rest], left[rest] = _cholesky_rows(R[rest], rtol)
    return rows, left


def _cholesky_rows(R: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """`_orthonormal_rows` by Cholesky QR of the unit-norm rows, three times.

    A row that one pass finds dependent keeps its residual, is scaled to norm one and tried again in the next.
    """
    R = R / _positive(R.abs().amax((-2, -1), keepdim=True))  # no overflow in the squares
    if kernels.usable(R, R.shape[-2]):
        return kernels.orthonormal_rows(R, rtol)
    left = torch.linalg.vector_norm(R, dim=-1, keepdim=True)
    left = left / _positive(left.amax(-2, keepdim=True))
    eye = torch.eye(R.shape[-2], dtype=R.dtype, device=R.device).expand(len(R), -1, -1)
    alive = left > rtol
    for _ in range(3):
        R = R * (alive / _positive(torch.linalg.vector_norm(R, dim=-1, keepdim=True)))
        L, kept = semidefinite_cholesky(R @ R.mT)
        R = torch.linalg.solve_triangular(L, eye, upper=False) @ R
        size = torch.linalg.vector_norm(R, dim=-1, keepdim=True)
        left = torch.where(kept[..., None], left, left * size)
        alive = alive & (left > rtol)
    return R * (alive & kept[..., None]), left


def _positive(x: Tensor) -> Tensor:
    """`x`, with ones for zeros: a divisor."""
    return torch.where(x > 0, x, 1.0)


def top_right_singular_vectors(A: Tensor, k: int, warm: Tensor | None = None, iterations: int = 4) -> Tensor:
    """The right singular vectors of the `k` largest singular values of one matrix, largest first.

    Without `warm`: exact, from the eigenvectors of the smaller of `AᵀA` and `AAᵀ`, scaled and in float64.
    With `warm`: `batched_top_subspace` from those columns, `iterations` products with `AᵀA` of that many
    columns; no eigenvalue problem of size `d`.
    Directions beyond `min(m, d)` or the numerical rank are zero columns. The rank counts the singular values
    above `max(m, d) eps` of the largest, and never below 1e-7 of it.

    Accuracy: without `warm`, float64 rounding over the relative gap to the next squared singular value. With
    it, see `batched_top_subspace`.
    Cost: `m d min(m, d)` and an `eigh` of size `min(m, d)`; with `warm`, `4 m d p` an iteration for `p`
    columns. Waits for the device.

    Args:
        A: (m, d).
        k: how many directions, at least 1.
        warm: (d, p), a basis from before; more columns than `k` converge faster.

    Returns:
        V: (d, k).
    """
    m, d = A.shape
    rtol = max(max(m, d) * torch.finfo(A.dtype).eps, 1e-7)
    if warm is not None:
        V, values = batched_top_subspace(lambda X: A.mT @ (A @ X), warm[None], k, iterations)
        return V[0] * (values[0] > rtol**2 * values[0, 0])
    S = (A / _positive(A.abs().amax())).double()
    if m < d:
        values, U = torch.linalg.eigh(S @ S.mT)
        V = orthonormal_columns(S.mT @ U.flip(-1)[:, :k])
    else:
        values, V = torch.linalg.eigh(S.mT @ S)
        V = V.flip(-1)[:, :k]
    top = values.flip(-1)[:k]
    V = V * (top > rtol**2 * top[0])
    return _pad_columns(V, k).to(A.dtype)


def _pad_columns(V: Tensor, k: int) -> Tensor:
    """`V` with zero columns on the right until there are `k`."""
    return torch.nn.functional.pad(V, (0, k - V.shape[-1]))


def largest_singular(matmul: Product, rmatmul: Product, start: Tensor, steps: int) -> Tensor:
    """The largest singular value of different matrices, known only by their products: (B,).

    Lanczos on `AᵀA` without reorthogonalisation: what comes of that are copies of the largest value.

    Accuracy: too small, never too large but for rounding. A 512 × 512 matrix of independent entries, half of its
    columns masked, which leaves no gap: up to 3e-2 after 8 steps, 2e-3 after 20. With a gap less.
    Cost: `steps` products with each of `A`, `Aᵀ`, and `B` eigenvalue problems of size `steps`.

    Args:
        matmul, rmatmul: (B, d) -> (B, m), (B, m) -> (B, d).
        start: (B, d), random.
        steps: how many Lanczos steps.
    """
    steps = min(steps, start.shape[-1])
    v, before = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True), torch.zeros_like(start)
    beta = start.new_zeros(len(start), 1)
    diagonal, beside = [], []
    for _ in range(steps):
        w = rmatmul(matmul(v))
        alpha = (w * v).sum(-1, keepdim=True)
        w = w - alpha * v - beta * before
        beta = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        before, v = v, w / _positive(beta)
        diagonal.append(alpha)
        beside.append(beta)
    T = torch.diag_embed(torch.cat(diagonal, -1))
    T.diagonal(-1, -2, -1).copy_(torch.cat(beside, -1)[:, :-1])
    if kernels.usable(T, steps):
        T = T + T.tril(-1).mT
        return kernels.eigh(T)[0][:, -1].clamp_min(0).sqrt()
    return torch.linalg.eigvalsh(T, UPLO="L")[:, -1].clamp_min(0).sqrt()


def batched_top_subspace(gram_product: Product, start: Tensor, k: int, iterations: int) -> tuple[Tensor, Tensor]:
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
    X, _ = _orthonormal_rows(start.mT.contiguous())  # (B, p, d): vectors are rows throughout
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
    return _ritz(Q, H, k)


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
    rows = torch.where(size > tiny * scale, residual / _positive(size), noise / noise.shape[-1] ** 0.5)
    rows, left = _orthonormal_rows(rows)
    if (torch.minimum(left, size / _positive(scale)) > 1e-2).all():
        return rows
    for least in (tiny, 0.5):  # what loses half its norm the second time was rounding the first time
        rows = rows - (rows @ basis.mT) @ basis
        rows = rows * (torch.linalg.vector_norm(rows, dim=-1, keepdim=True) > least)
        rows, _ = _orthonormal_rows(rows)
    return rows


def _ritz(Q: Tensor, H: Tensor, k: int, eigh: Eigh = torch.linalg.eigh) -> tuple[Tensor, Tensor]:
    """The top-k Ritz pairs from orthonormal rows `Q` (B, s, d) and `H = Q G Qᵀ` (its lower triangle)."""
    scale = _positive(H.abs().amax((-2, -1), keepdim=True))
    values, Z = eigh(H / scale)
    values = values.flip(-1)[..., :k]
    floor = 10 * Q.shape[-1] ** 0.5 * torch.finfo(Q.dtype).eps * values[..., :1]
    values = torch.where(values > floor, values, 0.0)
    V = (Z.flip(-1)[..., :k].mT @ Q).mT * (values[..., None, :] > 0)
    return _pad_columns(V, k), _pad_columns(values * scale[..., 0], k)


def chebyshev_top_subspace(
    gram: Product | Tensor, start: Tensor, k: int, degree: int, rounds: int
) -> tuple[Tensor, Tensor]:
    """Top-k eigenvectors of `batch` positive semi-definite matrices by filtered subspace iteration.

    Each round takes the smallest Ritz value of the block as the end of the unwanted part of the spectrum, `[0, a]`, and
    applies the Chebyshev polynomial of that interval, which stays below one on it and grows fastest above it. More
    products than `batched_top_subspace`, but no eigenvalue problem larger than the block: the better choice on a GPU.
    Where one eigenvalue lies far above the others a round stops early, before it swallows the block.
    Waits for the device.

    Accuracy: 512 × 512, no spectral gap, k = 10, block of 16, six rounds of degree 4: projector error 4e-4, and below
    1e-4 on trained weights. Reference: Zhou, Saad, Tiago, Chelikowsky 2006.

    Args:
        gram: (B, d, p) -> (B, d, p), or the matrices themselves, (B, d, d).
        start: (B, d, p), more columns than `k`.
        degree: of the filter in one round, at most.
        rounds: `degree * rounds` products with the block are spent.

    Returns:
        V (B, d, k), orthonormal, largest eigenvalue first, and the eigenvalues (B, k); zero beyond the rank.
    """
    times = gram if callable(gram) else partial(torch.bmm, gram)
    X = orthonormal_columns(start)
    left = degree * rounds
    while left > 0:
        GX = times(X)
        values, Z = torch.linalg.eigh(_symmetric(X.mT @ GX))
        high, edge = _ends(values, 1e-3)
        now = min(degree, left, _safe_degree(float((high / edge).max()), X.dtype))
        left -= now
        X = _filtered(times, X @ Z, GX @ Z, edge[..., None] / 2, now)
    return _ritz(X.mT, _symmetric(X.mT @ times(X)), k)


def steady_top_subspace(gram: Tensor, start: Tensor, k: int, degrees: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`chebyshev_top_subspace` with rounds of the same degrees whatever the matrices are: a GPU never waits.

    Where one eigenvalue lies far above the others a filter would swallow the block. The first round, of degree one or
    two, is harmless, and finds such directions well enough for the next rounds to lower their eigenvalues to a height
    that is safe.

    Accuracy, projector error, median and 90 % quantile, k = 10, half of the units open, block of 32 that starts from a
    basis of the batch. 512 × 512, no spectral gap, degrees (2, 8): 2e-3 and 5e-3, the same with a singular value up to
    ten times the others and on trained weights. A high degree caps low: where the wanted eigenvalues themselves reach
    twice the smallest of the block, as at width 128, it gives 1e-2, and (2, 4, 4) 1e-5. With a singular value of 30
    times the others the first fails and the second gives 5e-3 and 1e-2.

    Args:
        gram: (B, d, d).
        start: (B, d, p), more columns than `k`.
        degrees: of the filter, round by round.

    Returns:
        as `chebyshev_top_subspace`.
    """
    X = orthonormal_columns(start)
    for degree in degrees:
        GX = gram @ X
        values, Z = _small_eigh(_symmetric(X.mT @ GX), ROUGH)
        X, GX, G, widest = X @ Z, GX @ Z, gram, _widest(degree, X.dtype)
        _, edge = _ends(values, 1e-3 if degree > 2 else 1 / widest)
        if degree > 2:
            excess = (values - widest * edge).clamp_min(0)[:, None, :]
            GX, G = GX - X * excess, torch.baddbmm(gram, X * excess, X.mT, alpha=-1)
        half = edge[..., None] / 2
        twice = G * (2 / half)
        twice.diagonal(dim1=-2, dim2=-1).sub_(2)
        X = _filtered(twice, X, GX, half, degree)
    return _ritz(X.mT, _symmetric(X.mT @ (gram @ X)), k, partial(_small_eigh, sweeps=FINE))


def _small_eigh(H: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`; on a GPU a kernel that does not wait, and makes so many sweeps."""
    return kernels.eigh(H, sweeps) if kernels.usable(H, H.shape[-1]) else torch.linalg.eigh(H)


def _ends(values: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The largest Ritz value and the smallest, which is not below `least` of that: (B, 1) each."""
    high = values[:, -1:].clamp_min(torch.finfo(values.dtype).tiny)
    return high, torch.maximum(values[:, :1], least * high)


def _safe_degree(ratio: float, dtype: torch.dtype) -> int:
    """The degree up to which the strongest direction, `ratio` times the edge, leaves the others visible.

    The filter makes it `T_n(2 ratio - 1) = cosh(n acosh(2 ratio - 1))` times as strong.
    """
    return max(1, int(math.acosh(_largest_growth(dtype)) / math.acosh(2 * max(ratio, 1.01) - 1)))


def _widest(degree: int, dtype: torch.dtype) -> float:
    """The ratio for which this degree is just safe."""
    return (1 + math.cosh(math.acosh(_largest_growth(dtype)) / degree)) / 2


def _largest_growth(dtype: torch.dtype) -> float:
    return 1 / (8 * torch.finfo(dtype).eps)


def _filtered(gram: Product | Tensor, X: Tensor, GX: Tensor, half: Tensor, degree: int) -> Tensor:
    """`T_degree((G - half) / half) X`, orthonormalised; the columns of `X` are Ritz vectors, weakest first.

    `gram`: products with `G`, or all of a step of the recurrence as a matrix, `2 (G - half) / half`.
    """
    before, now = X, GX / half - X
    for _ in range(degree - 1):
        if isinstance(gram, Tensor):
            before, now = now, torch.baddbmm(before, gram, now, beta=-1)
        else:
            before, now = now, 2 * (gram(now) / half - now) - before
    now = now / _positive(torch.linalg.vector_norm(now, dim=-2, keepdim=True))  # how strong it is does not matter here
    return orthonormal_columns(now.flip(-1))  # strongest first: Gram–Schmidt keeps them


def _symmetric(H: Tensor) -> Tensor:
    return (H + H.mT) / 2


def newton_schulz(A: Tensor, coefficients: Sequence[float] | Tensor, steps: int) -> Tensor:
    """`p` applied `steps` times, `p(A) = Σ_j a_j A (AᵀA)^j`: the same as `p` on the singular values.

    Works on the smaller of `AᵀA` and `AAᵀ`.

    Accuracy: rounding, amplified by the slope of `p`.
    Cost, degree 7: four products a step, two of them with the small side only; `8 n³` operations for `n × n`.
    Reference: Kovarik 1970; Jordan et al. 2024 (Muon).

    Args:
        A: (..., m, d), singular values in the range where `p` was fitted, [0, 1].
        coefficients: `a_0, a_1, ...`, floats; or a tensor (..., number of them), one set per matrix.
        steps: how often `p` is applied.

    Returns:
        of the shape of `A`.
    """
    m, d = A.shape[-2:]
    a = coefficients.unbind(-1) if isinstance(coefficients, Tensor) else coefficients
    for _ in range(steps):
        P = polynomial(A @ A.mT if m < d else A.mT @ A, a)
        A = P @ A if m < d else A @ P
    return A


def polynomial(G: Tensor, a: Sequence[float | Tensor]) -> Tensor:
    """`Σ_j a_j G^j` by Horner's rule."""
    *others, last = (c[..., None] if isinstance(c, Tensor) else c for c in a)
    if not others:
        P = torch.zeros_like(G)
        P.diagonal(dim1=-2, dim2=-1).add_(last)
        return P
    P = G * (last[..., None] if isinstance(last, Tensor) else last)
    for i, c in enumerate(reversed(others)):
        P = P if i == 0 else P @ G
        P.diagonal(dim1=-2, dim2=-1).add_(c)
    return P
