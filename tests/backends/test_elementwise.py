"""Elementwise work on a CPU (`test_kernels` has the kernels)."""

from __future__ import annotations

import pytest
import torch

from gradguess.backends import cross_entropy, gram, positive, weigh
from matrices import F64, noise


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


def test_gram_matrices_are_parts_of_the_one_product():
    W, gate = noise(9, 7), noise(3, 4, seed=1)
    index = torch.tensor([[0, 2, 4, 6], [1, 1, 3, 5], [6, 5, 4, 0]])
    found = gram(W.mT @ W, index, gate)
    for b in range(3):
        columns = W[:, index[b]] * gate[b]
        torch.testing.assert_close(found[b], columns.mT @ columns)


def test_a_product_in_any_order_of_memory():
    product, index, gate = noise(5, 5).t(), torch.tensor([[3, 1]]), torch.ones(1, 2, dtype=F64)
    torch.testing.assert_close(gram(product, index, gate)[0], product[[3, 1]][:, [3, 1]])


def test_a_cpu_has_no_kernel_for_cross_entropy():
    x = torch.zeros(2, 3)
    assert cross_entropy(x, x, torch.tensor([0, 1]), -100) is None


def test_a_divisor_is_positive():
    assert positive(torch.tensor([2.0, 0.0, -1.0])).tolist() == [2.0, 1.0, 1.0]
