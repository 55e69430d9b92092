"""The kernels for a GPU against their twins in float64: on a GPU, or step by step in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguess import noise as numbers
from gradguess.backends import kernels
from gradguess.layers.attention import attention_tangent, in_blocks

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def split(a: list[Tensor], out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Queries, keys and values, what attention makes of them, and their tangents together."""
    return a[0], a[1], a[2], out, tuple(a[3:])


def attended(a: list[Tensor], mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": a[0].dim() == 4}
        return F.scaled_dot_product_attention(*a[:3], **options)


ATTENTION = {  # heads, heads of keys, queries, keys, head size; blocks of queries and keys
    "causal": (2, 2, 40, 40, 16, (16, 16)),
    "causal, more keys": (2, 2, 33, 50, 32, (16, 16)),
    "causal, fewer keys": (1, 1, 50, 20, 16, (16, 32)),
    "odd head": (1, 1, 20, 23, 24, (32, 16)),
    "shared heads": (4, 2, 20, 17, 16, (16, 16)),
    "boolean mask": (2, 2, 20, 37, 16, (16, 16)),
    "additive mask": (2, 2, 20, 37, 16, (16, 16)),
    "one query": (1, 1, 1, 5, 16, (64, 64)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ATTENTION), ("causal", torch.float16), ("boolean mask", torch.float16)],
)
def test_tangent_of_attention(name, dtype):
    heads, shared, T, N, d, tiles = ATTENTION[name]
    shapes = [(2, heads, T, d), (2, shared, N, d), (2, shared, N, d)] * 2
    a = [noise(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    a[1] = a[1].transpose(1, 2).contiguous().transpose(1, 2)  # other strides than its tangent
    if heads == 1:
        a[0] = a[0].mT.contiguous().mT  # the numbers of a position lie apart
    else:
        a[0], a[3] = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (a[0], a[3]))
    mask = None
    if name == "boolean mask":
        mask = noise(2, 1, T, N) > 0
        mask[0, 0, 3] = False  # a query that sees no key
    elif name == "additive mask":
        mask = noise(heads, T, N).to(dtype)
        mask[0, 1], mask[:, :, 2] = -torch.inf, -1e4
        if dtype == torch.float32:
            mask[:, 4] = torch.finfo(dtype).min  # the scores themselves are lost: all keys count alike
    rest = (name.startswith("causal"), 0.3)
    wide = mask.double() if name == "additive mask" else mask
    out = attended([t.double() for t in a], wide, *rest)
    exact = in_blocks(*split([t.double() for t in a], out), wide, *rest)
    on_device = None if mask is None else mask.to(DEVICE)
    found = kernels.attention_tangent(*split(on(*a), *on(out.to(dtype))), on_device, *rest, tiles=(*tiles, 4, 2))
    assert found.dtype == dtype
    assert found.stride() == kernels.like_queries(a[0], a[2]).stride()  # on this a graph relies
    near = max(2e-5, 4 * torch.finfo(dtype).eps) * float(exact.abs().max())
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=near)


def test_queries_that_overlap():
    a = [noise(1, 2, 25).unfold(2, 16, 1).float(), *(noise(1, 2, 10, 16, seed=i).float() for i in range(1, 6))]
    out = attended([t.double() for t in a], None, False, 0.3)
    exact = in_blocks(*split([t.double() for t in a], out), None, False, 0.3)
    found = kernels.attention_tangent(*split(on(*a), *on(out.float())), None, False, 0.3, tiles=(16, 16, 4, 2))
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=1e-4)


def test_the_kernel_for_attention_is_used_where_it_can_be(monkeypatch):
    monkeypatch.setattr(kernels, "_here", lambda t: True)
    used = []
    kernel = kernels.attention_tangent
    monkeypatch.setattr(kernels, "attention_tangent", lambda *args: used.append(1) or kernel(*args))

    def uses_kernel(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 0.3, e: int | None = None) -> bool:
        a = [noise(*shape[:-1], e or shape[-1] if i % 3 == 2 else shape[-1], seed=i).to(dtype) for i in range(6)]
        used.clear()
        out = attended([t.double() for t in a], None, True, scale)
        found = attention_tangent(*split(on(*a), *on(out.to(dtype))), causal=True, scale=scale)
        exact = in_blocks(*split([t.double() for t in a], out), None, True, scale)
        torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=1e-2)
        return bool(used)

    assert uses_kernel(1, 2, 5, 16)
    assert not uses_kernel(1, 2, 5, 16, dtype=torch.float32)
    assert not uses_kernel(1, 2, 5, 16, dtype=torch.float64)
    assert not uses_kernel(1, 2, 5, 16, scale=-0.3)
    assert not uses_kernel(1, 2, 5, 16, e=8)
    assert not uses_kernel(2, 5, 16)
    assert not uses_kernel(1, 1, 3, kernels.HEAD + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("row", "rows", "columns"), [(0, 3, 7), (-1, 1, 1300), (1000, 70, 10)])
def test_noise(row, rows, columns, dtype):
    key = torch.tensor(-(2**62) - 12345)
    found = kernels.normal_numbers(key.to(DEVICE), row, rows, 5, columns, dtype)
    torch.testing.assert_close(
        found.cpu(), numbers.normal_numbers(key, row, rows, 5, columns, dtype), rtol=1e-5, atol=1e-5
    )
