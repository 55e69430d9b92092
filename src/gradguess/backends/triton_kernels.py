"""The Triton kernels that `backends.kernels` launches."""

import triton
import triton.language as tl

from gradguess.backends.triton_attention import attention_tangent as attention_tangent


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
