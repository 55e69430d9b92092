"""The Triton kernels that `backends.kernels` launches: noise, and the tangent of attention.

One program of the latter goes over all keys that a block of queries sees, and keeps of them, for each query: the
largest score, the sum of weights, `Σ P dS` and `Σ P dV + (P ∘ dS) V`. Scores are taken relative to the largest one so
far, as in FlashAttention-2 (Dao 2023). D is the head size d, padded to a power of two with zeros.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BOOLEAN = tl.constexpr(1)


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
def _block(base, first, step, rows, count, d: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `first + rows` of a matrix whose rows lie `step` apart; zeros beyond its `count` rows and d columns."""
    i = tl.arange(0, D)
    at = base + tl.cast(first, tl.int64) * step + (rows[:, None] * step + i[None, :])
    if EDGE or d < D:
        return tl.load(at, mask=(first + rows[:, None] < count) & (i[None, :] < d), other=0.0)
    return tl.load(at)


@triton.jit
def _sweep(  # type: ignore[no-untyped-def]
    state, x, dx, k, dk, v, dv, mask, k_step, v_step, mask_step, mask_column, first, start, stop, queries, keys, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
    d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """All keys from `start` to `stop`. At an EDGE some of them may lie beyond the last key, or above the diagonal."""
    top, total, slope, moved = state
    i, j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    unit = scale * LOG2E  # of scores, which are exponents of two in the end
    for at in range(start, stop, KEYS):
        key = tl.trans(_block(k, at, k_step, j, keys, d, D, EDGE))
        s = tl.zeros((ROWS, KEYS), tl.float32)
        if MASK != 0:  # scores start from it, in their own unit
            corner = mask + tl.cast(first, tl.int64) * mask_step + tl.cast(at, tl.int64) * mask_column
            where = corner + (tl.minimum(i, queries - 1 - first)[:, None] * mask_step + j[None, :] * mask_column)
            if EDGE:
                shown = tl.load(where, mask=at + j[None, :] < keys, other=0)
            else:
                shown = tl.load(where)
            if MASK == BOOLEAN:
                s = tl.where(shown != 0, 0.0, float("-inf"))
            else:
                s = shown.to(tl.float32)
                s = tl.where(s > float("-inf"), tl.maximum(s, -1e30) / scale, s)
        s = tl.dot(x, key, s)
        dkey = tl.trans(_block(dk, at, k_step, j, keys, d, D, EDGE))
        ds = tl.dot(x, dkey, tl.dot(dx, key)) * scale
        if EDGE:
            seen = at + j[None, :] < keys
            if CAUSAL:
                seen = seen & (at + j[None, :] <= first + i[:, None])
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        level = tl.where(higher > float("-inf"), higher, 0.0) * unit  # zero for a query that has seen no key yet
        p = tl.exp2(s * unit - level[:, None])
        fade = tl.exp2(top * unit - level)
        total, top = total * fade + tl.sum(p, 1), higher
        w = p * ds
        slope = slope * fade + tl.sum(w, 1)
        value = _block(v, at, v_step, j, keys, d, D, EDGE)
        moved = tl.dot(w.to(value.dtype), value, moved * fade[:, None])
        dvalue = _block(dv, at, v_step, j, keys, d, D, EDGE)
        moved = tl.dot(p.to(value.dtype), dvalue, moved)
    return top, total, slope, moved


@triton.jit
def attention_tangent(  # type: ignore[no-untyped-def]
    q, dq, k, dk, v, dv, mask, out, dout,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step,
    mask_batch, mask_head, mask_step, mask_column, out_batch, out_head, out_step, to_batch, to_head, to_step,
    heads, group, queries, keys, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
    d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tangent has the strides of its value. The numbers of one position lie side by side."""
    blocks = tl.cdiv(queries, ROWS)
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS  # long rows start first
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i, f = tl.arange(0, ROWS), tl.arange(0, D)
    x = _block(q + b * q_batch + h * q_head, first, q_step, i, queries, d, D, True)
    dx = _block(dq + b * q_batch + h * q_head, first, q_step, i, queries, d, D, True)
    state = (
        tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, D), tl.float32),
    )  # fmt: skip
    k_at, v_at = b * k_batch + h // group * k_head, b * v_batch + h // group * v_head
    mask += b * mask_batch + h * mask_head
    stop = tl.minimum(keys, first + ROWS) if CAUSAL else keys
    whole = (tl.minimum(keys, first) if CAUSAL else keys) // KEYS * KEYS  # up to here all keys are there and seen
    state = _sweep(
        state, x, dx, k + k_at, dk + k_at, v + v_at, dv + v_at, mask, k_step, v_step, mask_step, mask_column,
        first, 0, whole, queries, keys, scale, MASK, CAUSAL, d, D, ROWS, KEYS, False,
    )  # fmt: skip
    _, total, slope, moved = _sweep(
        state, x, dx, k + k_at, dk + k_at, v + v_at, dv + v_at, mask, k_step, v_step, mask_step, mask_column,
        first, whole, stop, queries, keys, scale, MASK, CAUSAL, d, D, ROWS, KEYS, True,
    )  # fmt: skip
    share = 1 / tl.where(total > 0, total, 1.0)  # a query that sees no key gets zeros
    inside = (first + i[:, None] < queries) & (f[None, :] < d)
    row = (first + i[:, None]).to(tl.int64)
    o = tl.load(out + b * out_batch + h * out_head + row * out_step + f[None, :], mask=inside, other=0.0)
    moved = (moved - slope[:, None] * o.to(tl.float32)) * share[:, None]
    tl.store(
        dout + b * to_batch + h * to_head + row * to_step + f[None, :], moved.to(dout.dtype.element_ty), mask=inside
    )
