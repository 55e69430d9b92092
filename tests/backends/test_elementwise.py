"""Elementwise work on a CPU (`test_kernels` has the kernels)."""

from __future__ import annotations

import torch

from gradguess.backends import positive
from gradguess.backends.elementwise import cross_entropy


def test_a_cpu_has_no_kernel_for_cross_entropy():
    x = torch.zeros(2, 3)
    assert cross_entropy(x, x, torch.tensor([0, 1]), -100) is None


def test_a_divisor_is_positive():
    assert positive(torch.tensor([2.0, 0.0, -1.0])).tolist() == [2.0, 1.0, 1.0]
