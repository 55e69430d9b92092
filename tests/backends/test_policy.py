"""What other code is told about a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradguess.backends.policy import resolution


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
