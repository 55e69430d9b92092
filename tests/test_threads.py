"""Models that are trained in threads of their own: each as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from models import Case, Net, make


def gru() -> nn.Module:
    """Its kernels are switched off and on for the whole process."""
    return Net(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3))


def train_gru(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = gru().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    forward = gg.ForwardGradient(model, gg.WPerp(k=2), seed=seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, t = torch.randn(8, 4, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 3
    for _ in range(25):
        optimiser.zero_grad()
        forward(nn.CrossEntropyLoss(reduction="none"), x, t)
        optimiser.step()
    return [p.detach() for p in model.parameters()]


@cache
def transformer(seed: int) -> Case:
    """Made before the threads start: while it is made, PyTorch's default dtype is another."""
    return make("transformer")


def estimate_transformer(seed: int) -> list[Tensor]:
    case = transformer(seed)
    for _ in range(6):
        found = gg.estimate(case.model, gg.WTranspose(), *case.args, generator=torch.Generator().manual_seed(seed))
    return [found.loss, *(found.grads[name] for name in sorted(found.grads))]


@pytest.mark.parametrize("work", [train_gru, estimate_transformer])
def test_threads_wait_for_each_other(work: Callable[[int], list[Tensor]]):
    switches = torch._C._get_mkldnn_enabled(), torch.backends.cuda.flash_sdp_enabled()
    expected = [work(seed) for seed in range(3)]
    found: dict[int, list[Tensor]] = {}
    start = threading.Barrier(3)

    def run(seed: int) -> None:
        start.wait()
        found[seed] = work(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2], "a thread failed"
    for seed, tensors in enumerate(expected):
        for a, b in zip(found[seed], tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (torch._C._get_mkldnn_enabled(), torch.backends.cuda.flash_sdp_enabled()) == switches
