"""The Triton kernels that `backends.kernels` launches: noise, and attention with its tangent.

One program of the latter goes over all keys that a block of queries sees, and keeps of them, for each query: the
largest score, the sum of weights, `Σ P V`, `Σ P dS` and `Σ P dV + (P ∘ dS) V`. Scores are taken relative to the largest
one so far, as in FlashAttention-2 (Dao 2023). D is the head size d, padded to a power of two with zeros.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(32)  # heads that are worked on together: their keys and values fit into the cache


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


@triton.jit
def _rows(tensor, b, h, first, ROWS: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions `first` to `first + ROWS` of one head; zeros beyond the last position and feature."""
    return tensor.load([b, h, first, 0]).reshape(ROWS, D)


@triton.jit
def _add_product(total, a, b, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`total + a @ b` for `a` in float32: next to `b` in half precision it is a sum of two such numbers."""
    high = a.to(b.dtype)
    total = tl.dot(high, b, total, input_precision=EXACT)
    if b.dtype != tl.float32:
        total = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, total)
    return total


@triton.jit
def _sweep(  # type: ignore[no-untyped-def]
    state, x, dx, k, dk, v, dv, mask, mask_step, mask_column, b, h, first, start, stop, queries, keys, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """All keys from `start` to `stop`. At an EDGE some of them may lie beyond the last key, or above the diagonal."""
    top, total, slope, out, moved = state
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    unit = scale * LOG2E  # of scores, which are exponents of two in the end
    for at in tl.range(start, stop, KEYS, num_stages=STAGES):
        key = _rows(k, b, h, at, KEYS, D).T
        s = tl.zeros((ROWS, KEYS), tl.float32)
        if mask is not None:  # scores start from it, in their own unit
            corner = mask + tl.cast(first, tl.int64) * mask_step + tl.cast(at, tl.int64) * mask_column
            where = corner + (tl.minimum(i, queries - 1 - first)[:, None] * mask_step + j[None, :] * mask_column)
            if EDGE:
                shown = tl.load(where, mask=at + j[None, :] < keys, other=0)
            else:
                shown = tl.load(where)
            if shown.dtype == tl.uint8:
                s = tl.where(shown != 0, 0.0, float("-inf"))
            else:
                s = shown.to(tl.float32)
                s = tl.where(s > float("-inf"), tl.maximum(s, -1e30) / scale, s)
        s = tl.dot(x, key, s, input_precision=EXACT)
        ds = tl.zeros((ROWS, KEYS), tl.float32)
        if dx is not None:
            ds = tl.dot(dx, key, ds, input_precision=EXACT)
        if dk is not None:
            ds = tl.dot(x, _rows(dk, b, h, at, KEYS, D).T, ds, input_precision=EXACT)
        if EDGE:
            seen = at + j[None, :] < keys
            if CAUSAL:
                seen = seen & (at + j[None, :] <= first + i[:, None])
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        level = tl.where(higher > float("-inf"), higher, 0.0)  # zero for a query that has seen no key yet
        if mask is None:
            p = tl.exp2(s * unit - (level * unit)[:, None])
        else:  # zero where both are huge, however products are rounded
            p = tl.exp2((s - level[:, None]) * unit)
        fade = tl.exp2((top - level) * unit)
        total, top = total * fade + tl.sum(p, 1), higher
        value = _rows(v, b, h, at, KEYS, D)
        out = _add_product(out * fade[:, None], p, value, EXACT)
        moved *= fade[:, None]
        if dv is not None:
            moved = _add_product(moved, p, _rows(dv, b, h, at, KEYS, D), EXACT)
        if dx is not None or dk is not None:
            w = p * (ds * scale)
            slope = slope * fade + tl.sum(w, 1)
            moved = _add_product(moved, w, value, EXACT)
    return top, total, slope, out, moved


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q, dq, k, dk, v, dv, mask, out, dout,
    mask_batch, mask_head, mask_step, mask_column, to_batch, to_head, to_step,
    heads, group, queries, keys, scale,
    CAUSAL: tl.constexpr, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tangent or a mask that is None is left out. `out` and `dout` have the same strides."""
    blocks = tl.cdiv(queries, ROWS)
    many = tl.num_programs(0) // blocks  # heads of all samples
    one = tl.program_id(0) // (blocks * GROUP) * GROUP
    place, together = tl.program_id(0) - one * blocks, tl.minimum(GROUP, many - one)
    first = (blocks - 1 - place // together) * ROWS  # long rows start first
    b, h = (one + place % together) // heads, (one + place % together) % heads
    i, f = tl.arange(0, ROWS), tl.arange(0, D)
    x = _rows(q, b, h, first, ROWS, D)
    dx = None
    if dq is not None:
        dx = _rows(dq, b, h, first, ROWS, D)
    if mask is not None:
        mask += b.to(tl.int64) * mask_batch + h.to(tl.int64) * mask_head
    state = (
        tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32),
    )  # fmt: skip
    stop = tl.minimum(keys, first + ROWS) if CAUSAL else keys
    whole = (tl.minimum(keys, first) if CAUSAL else keys) // KEYS * KEYS  # up to here all keys are there and seen
    state = _sweep(
        state, x, dx, k, dk, v, dv, mask, mask_step, mask_column, b, h // group,
        first, 0, whole, queries, keys, scale, CAUSAL, D, ROWS, KEYS, EXACT, STAGES, False,
    )  # fmt: skip
    _, total, slope, value, moved = _sweep(
        state, x, dx, k, dk, v, dv, mask, mask_step, mask_column, b, h // group,
        first, whole, stop, queries, keys, scale, CAUSAL, D, ROWS, KEYS, EXACT, STAGES, True,
    )  # fmt: skip
    share = 1 / tl.where(total > 0, total, 1.0)  # a query that sees no key gets zeros
    value *= share[:, None]
    moved = moved * share[:, None] - (slope * share)[:, None] * value
    inside = (first + i[:, None] < queries) & (f[None, :] < d)
    to = b.to(tl.int64) * to_batch + h.to(tl.int64) * to_head + (first + i[:, None]).to(tl.int64) * to_step + f[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=inside)
    tl.store(dout + to, moved.to(dout.dtype.element_ty), mask=inside)
