"""The Triton kernels that `backends.kernels` launches.

K is k, padded to a power of two. The padding is zero, and never a pivot.
"""

import triton
import triton.language as tl

from gradguess.backends.triton_attention import attention_tangent as attention_tangent


@triton.jit
def _whitening(C, floor, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """`E` and `scale` with `diag(scale) E = L⁻¹` for `C = L Lᵀ`: Gauss elimination of `[C, I]`, in one loop.

    `scale` is zero for a pivot not above `floor`; its row of `E` holds what is left of it.
    """
    i = tl.arange(0, K)
    E = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    scale = tl.zeros((K,), tl.float32)
    for j in range(k):
        row = tl.sum(tl.where(i[:, None] == j, C, 0.0), 0)
        done = tl.sum(tl.where(i[:, None] == j, E, 0.0), 0)
        column = tl.sum(tl.where(i[None, :] == j, C, 0.0), 1)
        pivot = tl.sum(tl.where(i == j, column, 0.0), 0)
        root = tl.where(pivot > floor, tl.rsqrt(tl.where(pivot > floor, pivot, 1.0)), 0.0)
        scale = tl.where(i == j, root, scale)
        column = tl.where(i > j, column * (root * root), 0.0)
        C -= column[:, None] * row[None, :]
        E -= column[:, None] * done[None, :]
    return E, scale


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
    scale = tl.where(remains > rtol, 1.0 / tl.where(size > 0, size, 1.0), 0.0)
    E, root = _whitening(gram * scale[:, None] * scale[None, :], floor, k, K)
    tl.store(left + b * k + i, remains / tl.where(root > 0, root, 1.0), mask=i < k)
    if not last:
        root = tl.where(root > 0, root, 1.0)
    tl.store(M + at, root[:, None] * E * scale[None, :], mask=inside)


@triton.jit
def solve(C, z, w, batch, tolerance, n: tl.constexpr, k: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    i = tl.arange(0, K)
    inside = (i[:, None] < k) & (i[None, :] < k)
    gram = tl.load(C + b * k * k + i[:, None] * k + i[None, :], mask=inside, other=0.0)
    largest = tl.max(tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), 1), 0)
    E, scale = _whitening(gram, tolerance * largest, k, K)
    for t in range(n):
        at = (t * batch + b) * k + i
        noise = tl.load(z + at, mask=i < k, other=0.0)
        tl.store(w + at, tl.sum((noise * scale)[:, None] * E, 0), mask=i < k)


@triton.jit
def normal_numbers(  # type: ignore[no-untyped-def]
    key, z, row, column, rows, words, columns, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, c = i // words, i % words
    x = (((row + r) << 40) + column + c).to(tl.uint64) * 0x9E3779B97F4A7C15 + tl.load(key).to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    number = z.dtype.element_ty
    angle = (x >> 32).to(tl.uint32).to(tl.int32, bitcast=True).to(number) * 1.4629180792671596e-09  # π 2⁻³¹
    radius = tl.sqrt(-2 * tl.log(((x & 0x7FFFFFFF).to(number) + 1) * 4.656612873077393e-10))  # 2⁻³¹
    tl.store(z + r * columns + c, radius * tl.cos(angle), mask=r < rows)
    tl.store(z + r * columns + words + c, radius * tl.sin(angle), mask=(r < rows) & (words + c < columns))
