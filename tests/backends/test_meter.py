"""Seconds and peak memory of a run, against sizes that can be added up by hand."""

from __future__ import annotations

import torch
from torch import nn

from gradguess.backends.meter import peak_bytes

CPU = torch.device("cpu")


def floats(count: int) -> int:
    return 4 * count


def test_the_peak_is_of_what_lives_at_a_time():
    x = torch.ones(100)

    def run() -> None:
        a = x + 1  # 100
        b = a.repeat(3)  # 400
        del a  # 300
        c = b[:50] * 2  # 350
        del b, c
        torch.ones(200)

    assert peak_bytes(run, CPU) == floats(400)


def test_what_was_there_before_is_not_counted():
    layer, x = nn.Linear(10, 20), torch.ones(5, 10)

    def run() -> None:
        with torch.no_grad():
            layer(x).relu_().view(-1)  # in place and views: no memory of their own
        layer.weight.t()

    assert peak_bytes(run, CPU) == floats(5 * 20)


def test_a_reverse_graph_is_counted_with_the_gradients():
    x = torch.ones(4, 64)

    def peak(depth: int) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid()) for _ in range(depth)))
        found = peak_bytes(lambda: model(x).sum().backward(), CPU)
        assert found is not None
        return found

    grown = peak(12) - peak(11)
    activations, gradient = floats(2 * 4 * 64), floats(64 * 64)  # of one layer; an input and an output are kept
    assert activations // 2 <= grown <= activations + gradient
    assert peak(12) >= 12 * gradient


def test_a_sparse_tensor_is_as_large_as_its_parts():
    x = torch.eye(10)
    assert peak_bytes(x.to_sparse, CPU) == 2 * 8 * 10 + floats(10)  # two indices in int64 and a number each
