"""Memory on the device: a replayed pass does not grow with depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradguess as gg
from gpu_networks import loss_fn

WIDTH, ROWS = 256, 2048


def peak(depth: int, method: Any, **options: Any) -> float:
    """Activation memory of the third step, in megabytes, without the gradients of the model and of students."""
    layers = [module for _ in range(depth) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).cuda()
    x, t = torch.randn(ROWS, WIDTH, device="cuda"), torch.randint(0, 10, (ROWS,), device="cuda")
    forward = gg.ForwardGradient(model, method, **options)
    for _ in range(2):
        forward(loss_fn, x, t)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(loss_fn, x, t)
    learned = [entry["weights"] for entry in forward.learned.values() if "weights" in entry]
    gradients = sum(p.numel() * p.element_size() for p in (*model.parameters(), *learned))  # before they are added
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20


@pytest.mark.parametrize("method", [gg.WPerp(), gg.WTranspose(), gg.Feedback(gg.WPerp(), form="direct")])
def test_replay_does_not_grow_with_depth(method: Any):
    shallow, deep = (peak(depth, method, memory="replay") for depth in (8, 40))
    layer = ROWS * WIDTH * 4 / 2**20
    assert deep - shallow < 3 * layer


def test_store_keeps_a_little_more_than_backpropagation():
    ours, backprop = peak(24, gg.WPerp()), peak(24, gg.Backprop())
    assert ours < 3.5 * backprop


def test_pieces_with_students_are_freed_one_by_one():
    """Pieces of four layers, without being asked."""
    shallow, deep = (peak(depth, gg.Students(), sites=depth // 4) for depth in (8, 40))
    layer = ROWS * WIDTH * 4 / 2**20
    assert deep - shallow < 3 * layer
