"""The tangent of attention in blocks against PyTorch's own, which holds all pairs of positions, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguess as gg
from gradguess.layers import attention
from gradguess.layers.table import TangentRules
from models import Net

ATTENTION = torch.ops.gradguess.attention_tangent.default


class Made(TorchDispatchMode):
    """While open, notes the operations and the largest tensor that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[object] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append(func)
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def watched():
    """While open, counts how often our tangent is asked for."""
    return patch.object(attention, "attention_tangent", wraps=attention.attention_tangent)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 7)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sets(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys and values, then their tangents."""
    return [noise(*shape, seed=i) for i, shape in enumerate((q, k, v, q, k, v))]


def dual(function, values, tangents):
    """Output and tangent; a tangent of None stands for a constant."""
    with torch.no_grad(), fwAD.dual_level(), sdpa_kernel(SDPBackend.MATH):
        args = [p if t is None else fwAD.make_dual(p, t) for p, t in zip(values, tangents, strict=True)]
        return tuple(fwAD.unpack_dual(function(*args)))


def assert_same(function, values, tangents, *, used: bool = True, **close) -> None:
    """With the rules as without them; `used` says whether attention in blocks must have done it."""
    expected = dual(function, values, tangents)
    with TangentRules(), watched() as tangent:
        found = dual(function, values, tangents)
    assert tangent.called == used
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **close)


LONG = (2, 3, 20, 4)  # batch, heads, positions, head size: three blocks of queries
SEEN = noise(2, 1, 20, 13) > 0
SEEN[0, 0, 3] = False  # a query that sees nothing
BIAS = noise(3, 20, 20)
BIAS[:, :, 2] = -torch.inf
BIAS[0, 5] = -torch.inf
CASES = {
    "plain": (LONG, LONG, LONG, {}),
    "causal": (LONG, LONG, LONG, {"is_causal": True}),
    "causal, more keys": (LONG, (2, 3, 31, 4), (2, 3, 31, 4), {"is_causal": True}),
    "causal, fewer keys": (LONG, (2, 3, 9, 4), (2, 3, 9, 4), {"is_causal": True}),
    "one query": ((2, 3, 1, 4), LONG, LONG, {}),
    "boolean mask": (LONG, (2, 3, 13, 4), (2, 3, 13, 4), {"attn_mask": SEEN}),
    "padding": (LONG, LONG, LONG, {"attn_mask": noise(2, 1, 1, 20) > 0}),
    "additive mask": (LONG, LONG, LONG, {"attn_mask": BIAS}),
    "additive mask, float32": (LONG, LONG, LONG, {"attn_mask": noise(20, 20).float()}),
    "scale": (LONG, LONG, LONG, {"scale": 0.3}),
    "negative scale": (LONG, LONG, LONG, {"scale": -0.3}),
    "other values": (LONG, LONG, (2, 3, 20, 6), {"is_causal": True}),
    "without heads": (LONG[1:], LONG[1:], LONG[1:], {}),
    "a matrix": (LONG[2:], LONG[2:], LONG[2:], {"is_causal": True}),
    "shared heads": ((2, 6, 20, 4), (2, 2, 20, 4), (2, 2, 20, 4), {"enable_gqa": True, "is_causal": True}),
    "one shared head": ((2, 6, 20, 4), (2, 1, 20, 4), (2, 1, 20, 4), {"enable_gqa": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_attention(name, small_blocks):
    q, k, v, options = CASES[name]
    a = sets(q, k, v)
    attend = partial(F.scaled_dot_product_attention, **options)
    assert_same(attend, a[:3], a[3:])
    with TangentRules(always=True):  # a pass with a graph sees the same numbers
        moved = dual(attend, a[:3], a[3:])[0]
        recorded = attend(*(t.clone().requires_grad_() for t in a[:3]))
    assert recorded.requires_grad
    assert torch.equal(recorded, moved)


@pytest.mark.parametrize("constant", [(0,), (1, 2), (0, 2)], ids=str)
def test_what_has_no_tangent_is_a_constant(constant):
    a = sets(LONG, LONG, LONG)
    tangents = [None if i in constant else t for i, t in enumerate(a[3:])]
    assert_same(F.scaled_dot_product_attention, a[:3], tangents)


def test_what_is_not_covered_is_left_to_pytorch():
    a = sets(LONG, LONG, LONG)
    attend = F.scaled_dot_product_attention

    def dropped(q, k, v):
        torch.manual_seed(0)
        return attend(q, k, v, dropout_p=0.5)

    assert_same(dropped, a[:3], a[3:], used=False)
    assert_same(lambda q, k, v: attend(q, k, v, q @ k.mT), a[:3], a[3:], used=False)  # a mask that moves
    assert_same(lambda q, k, v: attend(q[:1], k, v), a[:3], a[3:], used=False)  # another batch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """The result is rounded once."""
    a = [t.to(dtype) for t in sets((1, 2, 300, 8), (1, 2, 300, 8), (1, 2, 300, 8))]
    exact = dual(F.scaled_dot_product_attention, [t.double() for t in a[:3]], [t.double() for t in a[3:]])
    with TangentRules():
        found = dual(F.scaled_dot_product_attention, a[:3], a[3:])
    for ours, truth in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() < 0.51 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("size", [0.0, 30.0])
def test_what_moves_all_scores_alike_cancels(size):
    """A part of the keys' tangent that all keys share changes no weight."""
    a = sets(LONG, LONG, LONG)
    a[4] = a[4] + size * noise(2, 3, 1, 4, seed=7)
    low = [t.to(torch.bfloat16) for t in a]
    exact = dual(F.scaled_dot_product_attention, [t.double() for t in low[:3]], [t.double() for t in low[3:]])[1]
    with TangentRules():
        found = dual(F.scaled_dot_product_attention, low[:3], low[3:])[1]
    assert (found.double() - exact).norm() < 0.004 * exact.norm()


LARGE = (2, 300, 8)
UNFUSED = {
    "without heads": (LARGE, LARGE, {}),
    "causal": (LARGE, LARGE, {"is_causal": True}),
    "other values": ((1, *LARGE), (1, 2, 300, 6), {}),
    "a mask for each head": ((4, *LARGE), (4, *LARGE), {"attn_mask": noise(2, 300, 300) > 0}),
    "causal, fewer keys": (LARGE, (2, 150, 8), {"is_causal": True}),
    "causal, more keys": (LARGE, (2, 450, 8), {"is_causal": True}),
    "a mask of one row": (LARGE, LARGE, {"attn_mask": noise(2, 1, 300) > 0}),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_where_no_kernel_is_fused_no_pass_holds_all_pairs(name):
    q, v, options = UNFUSED[name]
    a, made = sets(q, (*v[:-1], q[-1]), v), Made()
    attend = partial(F.scaled_dot_product_attention, **options)
    assert_same(attend, a[:3], a[3:])
    with TangentRules(), made:
        dual(attend, a[:3], a[3:])
    heads = a[0][..., 0, 0].numel()  # of all samples
    assert made.largest <= heads * 128 * v[-2]  # queries of a block, and keys


T = 400  # tokens
LOSS = nn.CrossEntropyLoss(reduction="none")


def attends() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Net(lambda m, x: m.head(m.layer(m.stem(x)).mean(1)), stem=nn.Linear(4, 8), layer=layer, head=nn.Linear(8, 3))


def take(steps: int, **options) -> Made:
    """What the last one makes. The first one finds the basis, with a graph of all pairs."""
    forward = gg.ForwardGradient(attends().double(), gg.WPerp(k=2), **options)
    made = Made()
    for i in range(steps):
        with made if i == steps - 1 else nullcontext():
            forward(LOSS, noise(2, T, 4), torch.tensor([0, 2]))
    return made


def test_no_pass_of_a_step_holds_all_pairs():
    made = take(2)
    assert made.operations.count(ATTENTION) == 1
    assert made.largest < T * T


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", [None, torch.randn(6, 6).double()], ids=["unmasked", "masked"])
def test_results_lie_in_memory_as_traces_are_told(heads, mask):
    """Few queries, positions before heads in memory, as nn.MultiheadAttention has them in a trace."""
    q, dq, k, v, dk, dv = (torch.randn(2, 6, n, 5).double().transpose(1, 2) for n in (4, 4, *[heads] * 4))
    given = (q, k, v, dq, dk, dv, mask, False, 0.4)
    for operation, args in (("tracked_tangent", given), ("tracked_gradients", (torch.ones_like(q), *given))):
        named = getattr(torch.ops.gradguess, operation).default
        torch.library.opcheck(named, args, test_utils="test_faketensor")
