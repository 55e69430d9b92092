"""Elementwise work on a CPU (`test_kernels` has the kernels)."""

from __future__ import annotations

import pytest
import torch

from gradguess.backends import positive
from gradguess.backends.elementwise import cross_entropy, weigh
from matrices import noise


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_rows_are_weighed_in_place(share):
    y, c = noise(4, 6), noise(4, seed=1)
    expected = torch.stack([share * c[b] * y[b] for b in range(4)])
    found = weigh(y, c, share)
    assert found is y
    torch.testing.assert_close(found, expected)


def test_a_transposed_tensor_is_weighed_too():
    y, c = noise(6, 4).t(), noise(4, seed=1)
    torch.testing.assert_close(weigh(y.clone(memory_format=torch.preserve_format), c), c[:, None] * y)


def test_a_cpu_has_no_kernel_for_cross_entropy():
    x = torch.zeros(2, 3)
    assert cross_entropy(x, x, torch.tensor([0, 1]), -100) is None


def test_a_divisor_is_positive():
    assert positive(torch.tensor([2.0, 0.0, -1.0])).tolist() == [2.0, 1.0, 1.0]
