"""The rule for cross entropy on the kernel of a GPU: on a GPU, or step by step in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from gradguess.backends import kernels
from gradguess.layers.tangents import TangentRules

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}, {"weight": torch.ones(4)}])
def test_the_rule_for_cross_entropy(options, monkeypatch):
    """With options that the kernel does not know, PyTorch's own formula."""
    x, t, target = noise(5, 4), noise(5, 4, seed=1), torch.tensor([0, 1, 2, 3, 1], device=DEVICE)
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    used = []
    real = kernels.cross_entropy
    monkeypatch.setattr(kernels, "usable", lambda t, k=1: t.dtype == torch.float32 and k <= kernels.LARGEST)
    monkeypatch.setattr(kernels, "cross_entropy", lambda *args: used.append(1) or real(*args))

    def loss(s: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(s, target, reduction="none", **options)

    def dual() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), fwAD.dual_level():
            return tuple(fwAD.unpack_dual(loss(fwAD.make_dual(x, t))))

    expected = dual()
    with TangentRules():
        found = dual()
    assert bool(used) == (set(options) <= {"ignore_index"})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
