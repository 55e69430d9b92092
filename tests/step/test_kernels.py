"""A step on the kernels of a GPU: on a GPU, or step by step in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends import cholesky, kernels

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_step(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).to(DEVICE)
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), seed=1)
    x, target = noise(7, 6).to(DEVICE), torch.arange(7, device=DEVICE) % 3
    loss = forward(nn.CrossEntropyLoss(reduction="none"), x, target)
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.skipif(DEVICE == "cuda", reason="compares the path of a CPU with that of a GPU")
def test_a_step_on_the_path_of_a_gpu_is_that_of_a_cpu(monkeypatch):
    used = []
    plain, real = small_step(), kernels.solve
    monkeypatch.setattr(kernels, "solve", lambda *args: used.append(1) or real(*args))
    monkeypatch.setattr(kernels, "usable", lambda t, k=1: t.dtype == torch.float32 and k <= kernels.LARGEST)
    monkeypatch.setattr(cholesky, "SMALL", 0)  # not the factorisation of a CPU
    for a, b in zip(plain, small_step(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert used
