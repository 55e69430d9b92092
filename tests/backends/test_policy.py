"""What other code is told about a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradguess.backends import preferences
from gradguess.backends.policy import resolution


def test_a_cpu_pays_for_every_column():
    cpu = preferences(torch.zeros(1))
    assert (cpu.free_columns, cpu.dense_gram, cpu.size_step, cpu.replays_functions) == (0, False, 8, False)


def test_a_gpu_reads_the_matrix_anyway():
    gpu = preferences(SimpleNamespace(is_cuda=True))
    assert (gpu.free_columns, gpu.dense_gram, gpu.size_step, gpu.replays_functions) == (32, True, 32, True)


def test_preferences_are_constants():
    with pytest.raises(dataclasses.FrozenInstanceError):
        preferences(torch.zeros(1)).size_step = 1


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
