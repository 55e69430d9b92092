"""Models through which no tangent can pass, each beside one that computes the same and can be differentiated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import BATCH, CLASSES, INPUTS, Calls, Case

WIDTH = 8


class NoJvp(torch.autograd.Function):
    """tanh, with reverse mode and without forward mode."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class NoDerivative(torch.autograd.Function):
    """tanh, with neither."""

    @staticmethod
    def forward(ctx, x):
        return x.tanh()


@torch.library.custom_op("gradguess_tests::tanh", mutates_args=())
def opaque_tanh(x: Tensor) -> Tensor:
    """tanh, of which autograd knows nothing."""
    return torch.tanh(x)


def numpy_tanh(x: Tensor) -> Tensor:
    """tanh, without a graph: as a kernel that is called directly."""
    return torch.from_numpy(np.tanh(x.detach().numpy()))


class Attends(nn.Module):
    """Attention by one kernel, whatever is switched on."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self.kernel = kernel
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1), x * x], 1)[:, None]  # (batch, heads, tokens, features)
        with sdpa_kernel(self.kernel):
            return self.out(F.scaled_dot_product_attention(*self.project(tokens).chunk(3, -1)).mean((1, 2)))


class Experts(nn.Module):
    """A mixture of two experts by grouped products, or by a loop."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.router = nn.Linear(WIDTH, 2)
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        if not self.grouped:
            return torch.einsum("bi,bij->bj", x, self.weight[chosen]) * share[:, None]
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=2).cumsum(0).int()
        y = F.grouped_mm(x[order], self.weight, offs=ends)
        return torch.empty_like(y).index_copy(0, order, y) * share[:, None]


def _between(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), middle, nn.GELU(), nn.Linear(WIDTH, CLASSES))


# name -> (the model, the same with dual numbers): the second is only made of what PyTorch can differentiate
GAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "function without jvp": (lambda: _between(Calls(NoJvp.apply)), lambda: _between(nn.Tanh())),
    "function without derivatives": (lambda: _between(Calls(NoDerivative.apply)), lambda: _between(nn.Tanh())),
    "custom operation": (lambda: _between(Calls(opaque_tanh)), lambda: _between(nn.Tanh())),
    "kernel without graph": (lambda: _between(Calls(numpy_tanh)), lambda: _between(nn.Tanh())),
    "flash attention": (
        lambda: _between(Attends(SDPBackend.FLASH_ATTENTION)),
        lambda: _between(Attends(SDPBackend.MATH)),
    ),
    "grouped products": (lambda: _between(Experts(grouped=True)), lambda: _between(Experts(grouped=False))),
}


def gap(name: str, dtype: torch.dtype = torch.float64, batch: int = BATCH) -> tuple[Case, Case]:
    """A case that no tangent can pass, and its twin."""
    cases = []
    for build in GAPS[name]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = build().to(dtype)
            cases.append(Case(model, torch.randn(batch, INPUTS).to(dtype), torch.randint(CLASSES, (batch,))))
    return cases[0], cases[1]
