"""Without a GPU nothing is recorded and nothing runs beside: the same code, called at once."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess import graphs, streams

CPU = torch.device("cpu")


def test_a_pure_function_is_just_called():
    calls = []

    @graphs.graphed
    def scaled(a: Tensor, b: Tensor, *, by: float) -> Tensor:
        """What it does."""
        calls.append(by)
        return by * (a + b)

    a, b = torch.ones(3), torch.arange(3.0)
    for by in (2.0, 2.0, 3.0):
        assert torch.equal(scaled(a, b, by=by), by * (a + b))
    assert calls == [2.0, 2.0, 3.0]
    assert scaled.__doc__ == "What it does."
    assert not graphs._seen


def test_work_beside_is_done_at_once():
    done = []
    with streams.beside(CPU, 1):
        done.append(1)
        assert streams.mark(CPU) is None
    streams.join(CPU)
    streams.join(CPU, None)
    assert done == [1]
    assert all(0 <= line < streams.LINES for line in (*streams.PRODUCTS, streams.DRAWS, streams.LOSS))
