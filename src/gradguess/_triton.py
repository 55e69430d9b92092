"""The kernels of `gradguess.kernels`. K is k, padded to a power of two; what is added is zero and never a pivot."""

import triton
import triton.language as tl


@triton.jit
def _factor(C, floor, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Right-looking Cholesky of one symmetric (K, K) matrix; a pivot not above `floor` gives a zero column."""
    i = tl.arange(0, K)
    L = tl.zeros_like(C)
    for j in range(k):
        column = tl.sum(tl.where(i[None, :] == j, C, 0.0), 1)
        row = tl.sum(tl.where(i[:, None] == j, C, 0.0), 0)  # the same numbers, laid out for the other side
        pivot = tl.sum(tl.where(i == j, column, 0.0), 0)
        scale = tl.where(pivot > floor, tl.rsqrt(tl.where(pivot > floor, pivot, 1.0)), 0.0)
        column = tl.where(i >= j, column * scale, 0.0)
        row = tl.where(i >= j, row * scale, 0.0)
        C -= column[:, None] * row[None, :]
        L = tl.where(i[None, :] == j, column[:, None], L)
    return L


@triton.jit
def _back(L, noise, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """`w` with `Lᵀ w = z`, from the last row to the first; zero where a pivot was dropped."""
    i = tl.arange(0, K)
    w = tl.zeros((K,), tl.float32)
    for back in range(k):
        j = k - 1 - back
        column = tl.sum(tl.where(i[None, :] == j, L, 0.0), 1)
        pivot = tl.sum(tl.where(i == j, column, 0.0), 0)
        rest = tl.sum(tl.where(i == j, noise, -column * w), 0)  # w_j is still zero
        w = tl.where(i == j, tl.where(pivot > 0, rest / tl.where(pivot > 0, pivot, 1.0), 0.0), w)
    return w


@triton.jit
def cholesky(C, floor, L, alive, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    i = tl.arange(0, K)
    at = b * k * k + i[:, None] * k + i[None, :]
    inside = (i[:, None] < k) & (i[None, :] < k)
    factor = _factor(tl.load(C + at, mask=inside, other=0.0), tl.load(floor + b), k, K)
    diagonal = i[:, None] == i[None, :]
    found = tl.sum(tl.where(diagonal, factor, 0.0), 1) > 0
    tl.store(L + at, tl.where(diagonal & (factor == 0), 1.0, factor), mask=inside)
    tl.store(alive + b * k + i, found, mask=i < k)


@triton.jit
def whiten(  # type: ignore[no-untyped-def]
    C, left, M, rtol, floor, first: tl.constexpr, last: tl.constexpr, k: tl.constexpr, K: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.arange(0, K)
    at = b * k * k + i[:, None] * k + i[None, :]
    inside = (i[:, None] < k) & (i[None, :] < k)
    diagonal = i[:, None] == i[None, :]
    gram = tl.load(C + at, mask=inside, other=0.0)
    size = tl.sqrt(tl.sum(tl.where(diagonal, gram, 0.0), 1))
    remains = size
    if first:
        remains = remains / tl.where(tl.max(size, 0) > 0, tl.max(size, 0), 1.0)
    else:  # a row that was kept has norm one; one that was dropped, what is left of it
        remains = size * tl.load(left + b * k + i, mask=i < k, other=0.0)
    tl.store(left + b * k + i, remains, mask=i < k)
    scale = tl.where(remains > rtol, 1.0 / tl.where(size > 0, size, 1.0), 0.0)
    L = _factor(gram * scale[:, None] * scale[None, :], floor, k, K)
    X = tl.zeros_like(L)  # the inverse of L with ones for zeros on its diagonal, row by row
    for j in range(k):
        row = tl.sum(tl.where(i[:, None] == j, L, 0.0), 0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        known = tl.sum(row[:, None] * X, 0)  # X_j is still zero
        new = (tl.where(i == j, 1.0, 0.0) - known) / tl.where(pivot > 0, pivot, 1.0)
        if last:
            new = tl.where(pivot > 0, new, 0.0)
        X = tl.where(i[:, None] == j, new[None, :], X)
    tl.store(M + at, X * scale[None, :], mask=inside)


@triton.jit
def draw(  # type: ignore[no-untyped-def]
    V,
    gate,
    z,
    y,
    batch,
    tolerance,
    n: tl.constexpr,
    d: tl.constexpr,
    k: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K)
    units = tl.arange(0, BLOCK)
    C = tl.zeros((K, K), tl.float32)
    for first in range(0, d, BLOCK):
        u = first + units
        D = tl.load(gate + b * d + u, mask=u < d, other=0.0)
        inside = (u[:, None] < d) & (i[None, :] < k)
        DV = D[:, None] * tl.load(V + u[:, None] * k + i[None, :], mask=inside, other=0.0)
        C = tl.dot(tl.trans(DV), DV, C, input_precision=PRECISION)
    diagonal = i[:, None] == i[None, :]
    L = _factor(C, tolerance * tl.max(tl.sum(tl.where(diagonal, C, 0.0), 1), 0), k, K)
    for t in range(n):
        noise = tl.load(z + (t * batch + b) * k + i, mask=i < k, other=0.0)
        w = _back(L, noise, k, K)
        for first in range(0, d, BLOCK):
            u = first + units
            D = tl.load(gate + b * d + u, mask=u < d, other=0.0)
            inside = (u[:, None] < d) & (i[None, :] < k)
            rows = tl.load(V + u[:, None] * k + i[None, :], mask=inside, other=0.0)
            tl.store(y + (t * batch + b) * d + u, D * tl.sum(rows * w[None, :], 1), mask=u < d)


@triton.jit
def solve(C, z, w, batch, tolerance, n: tl.constexpr, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    i = tl.arange(0, K)
    inside = (i[:, None] < k) & (i[None, :] < k)
    gram = tl.load(C + b * k * k + i[:, None] * k + i[None, :], mask=inside, other=0.0)
    largest = tl.max(tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), 1), 0)
    L = _factor(gram, tolerance * largest, k, K)
    for t in range(n):
        at = (t * batch + b) * k + i
        tl.store(w + at, _back(L, tl.load(z + at, mask=i < k, other=0.0), k, K), mask=i < k)


@triton.jit
def gram(  # type: ignore[no-untyped-def]
    product, index, gate, G, d, a, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.load(index + b * a + rows, mask=rows < a, other=0)
    j = tl.load(index + b * a + columns, mask=columns < a, other=0)
    scale = tl.load(gate + b * a + rows, mask=rows < a, other=0.0)
    scales = tl.load(gate + b * a + columns, mask=columns < a, other=0.0)
    values = tl.load(product + i[:, None] * d + j[None, :]) * scale[:, None] * scales[None, :]
    at = (b * a + rows[:, None]) * a + columns[None, :]
    tl.store(G + at, values, mask=(rows[:, None] < a) & (columns[None, :] < a))
