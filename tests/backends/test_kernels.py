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


@pytest.fixture(autouse=True)
def _steps(monkeypatch):
    if DEVICE == "cpu":  # the interpreter knows no products in several parts
        monkeypatch.setattr(kernels, "EXACT", "ieee")


def on(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(DEVICE) for t in tensors]


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def attended(a: list[Tensor], mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": a[0].dim() == 4}
        return F.scaled_dot_product_attention(*a[:3], **options)


ATTENTION = {  # heads, heads of keys, queries, keys, head size; which tangents are missing
    "causal": (2, 2, 150, 150, 16, ""),
    "causal, more keys": (2, 2, 65, 100, 32, "q"),
    "causal, fewer keys": (1, 1, 100, 40, 16, "kv"),
    "odd head": (1, 1, 20, 43, 21, "v"),
    "large head": (1, 1, 70, 40, 128, ""),
    "shared heads": (4, 2, 20, 37, 16, "k"),
    "many heads": (17, 17, 70, 33, 16, "qk"),
    "boolean mask": (2, 2, 70, 77, 16, ""),
    "padding": (2, 2, 70, 77, 16, ""),
    "additive mask": (2, 2, 70, 77, 16, "qv"),
    "one query": (1, 1, 1, 5, 16, ""),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_with_its_tangent(name, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    heads, shared, T, N, d, missing = ATTENTION[name]
    shapes = [(2, heads, T, d), (2, shared, N, d), (2, shared, N, d)] * 2
    a: list[Tensor | None] = [noise(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    a[1] = a[1].transpose(1, 2).contiguous().transpose(1, 2)  # other strides than its tangent
    if heads == 1:
        a[0] = a[0].mT.contiguous().mT  # the numbers of a position lie apart
    else:
        a[0] = a[0].transpose(1, 2).contiguous().transpose(1, 2)
    a[3:] = [None if letter in missing else t for letter, t in zip("qkv", a[3:], strict=True)]
    mask = None
    if name == "boolean mask":
        mask = noise(2, 1, T, N) > 0
        mask[0, 0, 3] = False  # a query that sees no key
    elif name == "padding":
        mask = noise(2, 1, 1, N) > 0
        mask[0] = False
    elif name == "additive mask":
        mask = noise(heads, T, N).to(dtype)
        mask[0, 1], mask[:, :, 2] = -torch.inf, -1e4
        if dtype == torch.float32:
            mask[:, 4] = torch.finfo(dtype).min  # the scores themselves are lost: all keys count alike
    wide = mask.double() if name == "additive mask" else mask
    rest = (name.startswith("causal"), 0.3)
    exact = attended(doubles(*a), wide, *rest), in_blocks(*doubles(*a[:3]), doubles(*a[3:]), wide, *rest)
    found = kernels.attention(*on(*a[:3]), on(*a[3:]), None if mask is None else mask.to(DEVICE), *rest)
    for ours, truth in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert ours.stride() == kernels.like_queries(a[0], a[2]).stride()  # on this a graph relies
        near = 2e-6 if dtype == torch.float32 else 0.3 * torch.finfo(dtype).eps  # rounded once
        assert float((ours.cpu().double() - truth).norm() / truth.norm()) < near


def test_queries_that_overlap():
    a = [noise(1, 2, 25).unfold(2, 16, 1).float(), *(noise(1, 2, 10, 16, seed=i).float() for i in range(1, 6))]
    exact = in_blocks(*doubles(*a[:3]), doubles(*a[3:]), None, False, 0.3)
    found = kernels.attention(*on(*a[:3]), on(*a[3:]), None, False, 0.3)[1]
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=1e-4)


def test_the_kernel_for_attention_is_used_where_it_can_be(monkeypatch):
    monkeypatch.setattr(kernels, "_here", lambda t: True)
    used = []
    kernel = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args: used.append(1) or kernel(*args))

    def uses_kernel(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 0.3, e: int | None = None) -> bool:
        a = [noise(*shape[:-1], e or shape[-1] if i % 3 == 2 else shape[-1], seed=i).to(dtype) for i in range(6)]
        used.clear()
        value, found = attention_tangent(*on(*a[:3]), on(*a[3:]), causal=True, scale=scale)
        exact = (
            attended(doubles(*a), None, True, scale),
            in_blocks(*doubles(*a[:3]), doubles(*a[3:]), None, True, scale),
        )
        torch.testing.assert_close(found.cpu().double(), exact[1], rtol=0, atol=1e-2)
        assert (value is not None) == bool(used)
        if value is not None:
            torch.testing.assert_close(value.cpu().double(), exact[0], rtol=0, atol=1e-2)
        return bool(used)

    assert uses_kernel(1, 2, 5, 16)
    assert uses_kernel(1, 2, 130, 16, dtype=torch.float32)
    assert not uses_kernel(1, 2, 5, 16, dtype=torch.float32)  # plain operations are fused with those around them
    assert not uses_kernel(1, 2, 130, 16, dtype=torch.float64)
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
