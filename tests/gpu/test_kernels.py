"""Every kernel against its slow twin in float64 on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguess.guesses import GatedBasis
from gradguess.layers.attention import in_blocks
from gradguess.layers.table import TangentRules
from gradguess.linalg import orthonormal_columns


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("k", [1, 10, 32])
def test_roots(k: int):
    V = orthonormal_columns(noise(96, k))
    gate = (noise(64, 96, seed=1) > 0).double()
    gate[0] = 0  # a sample without open units
    z = noise(3, 64, k, seed=2)
    found = GatedBasis(V.float().cuda(), gate.float().cuda(), 64).apply(z.float().cuda())
    assert relative(found, GatedBasis(V, gate, 64).apply(z)) < 1e-5


@pytest.mark.parametrize(("d", "k"), [(40, 1), (40, 10), (512, 32)])
def test_orthonormal_columns(d: int, k: int):
    A = noise(30, d, k)
    A[2, :, k // 2] = A[2, :, 0] if k > 1 else 0
    Q = orthonormal_columns(A.float().cuda())
    assert relative(Q, orthonormal_columns(A)) < 1e-5
    eye = Q.mT @ Q
    assert float((eye - torch.diag_embed(eye.diagonal(dim1=-2, dim2=-1))).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "additive", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("graph", [False, True])
def test_attention_with_a_tangent(dtype: torch.dtype | str, kind: str, graph: bool):
    """Output and tangent against float64; with a graph, the output's gradient too."""
    half = torch.bfloat16 if dtype == "autocast" else dtype
    a = [noise(2, 4, 170, 32, seed=i).to(half).cuda() for i in range(7)]
    given = [t.float() for t in a] if dtype == "autocast" else a
    mask = None
    if kind not in ("none", "causal"):
        mask = noise(2, 1, 170, 170, seed=9).cuda()
        mask = mask > 0 if kind == "boolean" else mask.to(torch.float32 if kind == "float32" else given[0].dtype)
        mask[0, 0, 3] = False if kind == "boolean" else -torch.inf  # a query that sees no key
        if kind == "float32" and dtype in (torch.float16, torch.bfloat16):
            mask = mask.to(half)  # its kernels for CUDA take no other, but under autocast

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shown = mask.double() if mask is not None and mask.is_floating_point() and q.dtype == torch.float64 else mask
        return F.scaled_dot_product_attention(q, k, v, shown, is_causal=kind == "causal")

    wide = [t.double().requires_grad_() for t in a[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.functional.jvp(attend, tuple(wide), tuple(t.double() for t in a[3:6]))
        slopes = torch.autograd.grad(attend(*wide), wide, a[6].double())
    leaves = [t.clone().requires_grad_(graph) for t in given[:3]]
    lower = torch.autocast("cuda", torch.bfloat16, enabled=dtype == "autocast")
    with lower, fwAD.dual_level(), TangentRules(always=True):
        out, moved = fwAD.unpack_dual(attend(*map(fwAD.make_dual, leaves, given[3:6])))
    assert out.requires_grad == graph
    found = torch.autograd.grad(out, leaves, a[6].to(out.dtype)) if graph else ()
    slopes = slopes if graph else ()
    near = 1e-4 if half == torch.float32 else 8 * torch.finfo(half).eps
    for ours, theirs in zip((out, moved, *found), (*expected, *slopes), strict=True):
        assert float((ours - theirs).detach().abs().max()) < near * max(1.0, float(theirs.detach().abs().max()))


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_tangent_in_a_cuda_graph(dtype: torch.dtype, kind: str):
    """A replay sees what the arguments hold by then."""

    def run(a: list[Tensor]) -> list[Tensor]:
        return list(torch.ops.gradguess.attention(*a[:3], a[3:], None, True, 0.2))

    work = torch.compile(run, fullgraph=True) if kind == "compiled" else run
    a = [torch.zeros(2, 4, 150, 40, device="cuda", dtype=dtype) for _ in range(6)]
    for _ in range(2):
        work(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work(a)
    for i, t in enumerate(a):
        t.copy_(noise(2, 4, 150, 40, seed=i))
    graph.replay()
    wide = [t.double().cpu() for t in a]
    options = {"is_causal": True, "scale": 0.2}
    expected = F.scaled_dot_product_attention(*wide[:3], **options), in_blocks(*wide[:3], wide[3:], None, True, 0.2)
    for ours, truth in zip(found, expected, strict=True):
        assert relative(ours, truth) < (1e-5 if dtype == torch.float32 else 3e-3)
