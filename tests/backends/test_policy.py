"""What other code is told about a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import gradguess as gg
from gradguess.backends.policy import kept_dtype, resolution


@contextmanager
def rounding(kernel: Any, precision: str) -> Iterator[None]:
    before = kernel.fp32_precision
    kernel.fp32_precision = precision
    try:
        yield
    finally:
        kernel.fp32_precision = before


def test_the_coarsest_rounding_counts():
    """The dtype's own, that of autocast, and that of float32 products where a coarser one is allowed."""
    single, double, own = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.finfo(torch.float32).eps
    assert resolution(single, convolves=True) == own
    assert resolution(single.bfloat16(), convolves=False) == torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert resolution(single, convolves=False) == torch.finfo(torch.bfloat16).eps
    with rounding(torch.backends.mkldnn.conv, "tf32"):
        assert resolution(single, convolves=True) == 2.0**-10
        assert resolution(single, convolves=False) == own
    with rounding(torch.backends.mkldnn.matmul, "bf16"):
        assert resolution(single, convolves=False) == 2.0**-7
        assert resolution(double, convolves=True) == torch.finfo(torch.float64).eps
    assert resolution(single, convolves=True) == own


def test_bases_are_kept_in_the_precision_of_autocast():
    """Half the memory between steps, and a projector up to the rounding of bfloat16, which directions have anyway."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    x, t = torch.randn(8, 6), torch.randint(0, 4, (8,))
    kept = []
    for enabled in (False, True):
        forward = gg.ForwardGradient(model, gg.WPerp(k=3))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            forward(nn.CrossEntropyLoss(reduction="none"), x, t)
        kept.append(forward.kept)
    plain, mixed = kept
    assert plain.keys() == mixed.keys() > {"0", "2"}
    for site, entries in mixed.items():
        V = entries["basis"]
        assert V.dtype == torch.bfloat16
        assert plain[site]["basis"].dtype == torch.float32
        torch.testing.assert_close(V.float().t() @ V.float(), torch.eye(3), atol=1e-2, rtol=0)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
        assert kept_dtype(torch.zeros(1, dtype=torch.int64)) == torch.int64
        assert kept_dtype(torch.zeros(1)) == torch.bfloat16
