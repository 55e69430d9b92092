"""Tangents in closed form against PyTorch's own formulas, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.layers.table import TangentRules

torch.manual_seed(0)
VECTORS, TOKENS, IMAGES = torch.randn(6, 8), torch.randn(3, 5, 8), torch.randn(3, 8, 7, 6)
CONSTANT = torch.randn(3, 5, 8, dtype=torch.float64)

STRIDED = torch.randn(8, 2, dtype=torch.float64).unbind(1)


def shaken(module: nn.Module) -> nn.Module:
    """With weights of a norm that are not one, and statistics that are not those of noise."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    return module.double()


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "linear": (shaken(nn.Linear(8, 4)), VECTORS),
    "linear, no bias": (shaken(nn.Linear(8, 4, bias=False)), VECTORS),
    "linear, tokens": (shaken(nn.Linear(8, 4)), TOKENS),
    "linear, options by name": (lambda x: F.linear(x, weight=CONSTANT[0], bias=None), TOKENS),
    "addmm": (lambda x: torch.addmm(CONSTANT[0, 0, :5], x, CONSTANT[0].t()), VECTORS),
    "addmm, by name": (lambda x: torch.addmm(CONSTANT[0, 0, :5], mat1=x, mat2=CONSTANT[0].t()), VECTORS),
    "addmm, scaled": (lambda x: torch.addmm(CONSTANT[0, 0, :5], x, CONSTANT[0].t(), beta=2, alpha=3), VECTORS),
    "addmm, in the other place": (lambda x: torch.addmm(CONSTANT[0, 0, :6], CONSTANT[0], x.t()), VECTORS),
    "conv1d": (shaken(nn.Conv1d(5, 4, 3, padding=1)), TOKENS),
    "conv2d": (shaken(nn.Conv2d(8, 4, 3, stride=2, padding=1)), IMAGES),
    "conv2d, grouped": (shaken(nn.Conv2d(8, 8, 3, groups=4, dilation=2, bias=False)), IMAGES),
    "conv2d, same": (shaken(nn.Conv2d(8, 4, 3, padding="same")), IMAGES),
    "conv3d": (shaken(nn.Conv3d(3, 2, 2)), IMAGES),
    "conv_transpose2d": (shaken(nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)), IMAGES),
    "layer_norm": (shaken(nn.LayerNorm(8)), TOKENS),
    "layer_norm, two dimensions": (shaken(nn.LayerNorm((5, 8), eps=0.1)), TOKENS),
    "layer_norm, bare": (shaken(nn.LayerNorm(8, elementwise_affine=False)), TOKENS),
    "layer_norm, no bias": (shaken(nn.LayerNorm(8, bias=False)), TOKENS),
    "rms_norm": (shaken(nn.RMSNorm(8)), TOKENS),
    "rms_norm, eps": (shaken(nn.RMSNorm((5, 8), eps=0.1, elementwise_affine=False)), TOKENS),
    "group_norm": (shaken(nn.GroupNorm(4, 8)), IMAGES),
    "group_norm, bare": (shaken(nn.GroupNorm(4, 8, affine=False)), IMAGES),
    "group_norm, one dimension": (lambda x: F.group_norm(x.transpose(1, 2), 4, *CONSTANT[:2, 0]), TOKENS),
    "group_norm, three dimensions": (lambda x: F.group_norm(x[..., None], 4, *CONSTANT[:2, 0]), IMAGES),
    "group_norm, a weight with strides": (lambda x: F.group_norm(x, 4, *STRIDED), IMAGES),
    "group_norm, one number as weight": (lambda x: F.group_norm(x, 4, CONSTANT[0, 0, :1].expand(8)), IMAGES),
    "group_norm, vectors": (shaken(nn.GroupNorm(2, 8, eps=0.1)), VECTORS),
    "batch_norm": (shaken(nn.BatchNorm2d(8)), IMAGES),
    "batch_norm, vectors": (shaken(nn.BatchNorm1d(8)), VECTORS),
    "batch_norm, at rest": (shaken(nn.BatchNorm2d(8)).eval(), IMAGES),
    "batch_norm, no statistics": (shaken(nn.BatchNorm2d(8, affine=False, track_running_stats=False)), IMAGES),
    "relu": (nn.ReLU(), TOKENS),
    "relu, in place": (lambda x: F.relu(x * 1.0, inplace=True), TOKENS),
    "relu, a method": (lambda x: x.relu(), TOKENS),
    "relu, at zero": (lambda x: torch.relu(x - CONSTANT), CONSTANT),
    "gelu": (nn.GELU(), TOKENS),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), TOKENS),
    "silu": (nn.SiLU(), TOKENS),
    "silu, in place": (lambda x: F.silu(x * 1.0, inplace=True), TOKENS),
    "tanh": (nn.Tanh(), TOKENS),
    "tanh, a method": (lambda x: x.tanh(), TOKENS),
    "x + k": (lambda x: x + CONSTANT, TOKENS),
    "k + x": (lambda x: CONSTANT + x, TOKENS),
    "x - k": (lambda x: torch.sub(x, CONSTANT), TOKENS),
    "k - x": (lambda x: CONSTANT - x, TOKENS),
    "x + k, broadcast": (lambda x: x + CONSTANT[:, 0], TOKENS[:1, :3]),
    "x + k, scaled": (lambda x: torch.add(x, CONSTANT, alpha=3), TOKENS),
    "x · k": (lambda x: x * CONSTANT[0], TOKENS),
    "k · x": (lambda x: CONSTANT * x[:1], TOKENS),
    "x / k": (lambda x: x / CONSTANT, TOKENS),
    "k / x": (lambda x: CONSTANT / x, TOKENS),
    "x + x": (lambda x: x + x * x, TOKENS),
    "x · number": (lambda x: x * 3.0, TOKENS),
    "k + 0-dim": (lambda x: CONSTANT + x.sum(), TOKENS),
}


HALF = [nn.RMSNorm((8, 7, 6)), nn.LayerNorm((8, 7, 6)), nn.GroupNorm(4, 8), nn.BatchNorm2d(8)]


def dual(function: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), fwAD.dual_level():
        primal, tangent = fwAD.unpack_dual(function(fwAD.make_dual(x, t)))
        assert tangent is not None
        return primal, tangent


@pytest.mark.parametrize("case", CASES)
def test_as_pytorch_does(case):
    function, x = CASES[case]
    x = x.double()
    t = torch.randn_like(x)
    expected = dual(function, x, t)
    with torch.no_grad():
        value = function(x)
    with TangentRules():
        found = dual(function, x, t)
    assert torch.equal(found[0], value)  # the model's own, bit for bit
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def test_a_group_norm_of_channels_that_lie_last():
    """PyTorch's own formula cannot view them."""
    norm, x, t = shaken(nn.GroupNorm(4, 8)), IMAGES.double(), torch.randn(IMAGES.shape).double()
    expected = dual(norm, x, t)
    last = torch.channels_last
    with TangentRules():
        found = dual(norm, x.contiguous(memory_format=last), t.contiguous(memory_format=last))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert one.is_contiguous(memory_format=last)


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 8), nn.LayerNorm((8, 7, 6))], ids=["group_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_far_from_zero(norm, dtype):
    """Means as large as a hundred deviations: statistics are not rounded to half precision on the way."""
    norm = norm.to(dtype)
    x, t = (100 + IMAGES).to(dtype), torch.randn(IMAGES.shape).to(dtype)
    with TangentRules():
        found = dual(norm, x, t)[1].double()
    expected = dual(norm.double(), x.double(), t.double())[1]
    assert (found - expected).norm() < 0.5 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("size", [400, 1, 1e-3])
@pytest.mark.parametrize("norm", HALF, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_at_every_size(norm, dtype, size):
    """Squares of 400, and the sum over a tangent that points along its own values, are too large for float16."""
    norm = norm.to(dtype)
    x, t = (size * IMAGES).to(dtype), (size * (IMAGES + 0.1 * torch.randn(IMAGES.shape))).to(dtype)
    with TangentRules():
        found = dual(norm, x, t)[1]
    expected = dual(norm.float(), x.float(), t.float())[1]
    assert found.dtype == dtype
    assert (found - expected).norm() < 0.5 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("make", [lambda x: x + CONSTANT, lambda x: x * CONSTANT, lambda x: x - CONSTANT])
def test_what_is_done_in_place_stays_there(make):
    """x + relu_(x + k): the tangent of the sum is not that of x."""
    x, t = TOKENS.double(), torch.randn(3, 5, 8, dtype=torch.float64)
    expected = dual(lambda x: x + make(x).relu_().mul_(2), x, t)[1]
    with TangentRules():
        found = dual(lambda x: x + make(x).relu_().mul_(2), x, t)[1]
    torch.testing.assert_close(found, expected)


def test_a_weight_that_has_a_tangent_is_left_to_pytorch():
    x, t = VECTORS.double(), torch.randn(6, 8, dtype=torch.float64)
    with TangentRules():
        _, found = dual(lambda x: F.linear(VECTORS.double(), x), x, t)
        _, both = dual(lambda x: F.linear(x, x * 2), x, t)
        _, norm = dual(lambda x: F.layer_norm(x, (8,), x[0], x[1]), x, t)
    torch.testing.assert_close(found, VECTORS.double() @ t.t())
    torch.testing.assert_close(both, 2 * (t @ x.t() + x @ t.t()))
    torch.testing.assert_close(norm, dual(lambda x: F.layer_norm(x, (8,), x[0], x[1]), x, t)[1])
