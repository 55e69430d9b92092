"""Traces: what they hold in memory, and what they know of the numbers in a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.backends import inductor, tracing


def test_a_trace_holds_no_tensor_that_the_step_has_let_go():
    most = 0

    def long(x: Tensor) -> list[Tensor]:
        nonlocal most
        for _ in range(20):
            x = x.sin()
            assert tracing._Made.now is not None
            most = max(most, len(tracing._Made.now.by_place))
        return [x]

    x = torch.randn(100)
    graph = tracing.trace(long, [x])
    torch.testing.assert_close(graph(x), long_twin(x))
    assert most <= 3


def long_twin(x: Tensor) -> list[Tensor]:
    for _ in range(20):
        x = x.sin()
    return [x]


def test_a_place_in_memory_may_be_used_again():
    """Numbers that are the same in every step may be looked at, even where others lay before."""
    places = set[int]()

    def step(x: Tensor) -> list[Tensor]:
        for _ in range(10):
            y = x * 2
            places.add(y.data_ptr())
            del y
            z = torch.arange(100)
            places.add(z.data_ptr())
            assert z.sum().item() == 4950
            del z
        return [x + 1]

    tracing.trace(step, [torch.randn(100, dtype=torch.float64)])  # numbers of the same size
    assert len(places) < 20  # some place was used twice


def test_what_depends_on_the_arguments_is_not_looked_at_where_steady_numbers_lay():
    def step(x: Tensor) -> list[Tensor]:
        for _ in range(10):
            z = torch.arange(100)
            del z
            if (x * 2)[0].item() > 0:
                x = x + 1
        return [x]

    with pytest.raises(tracing.NotTraceable, match="looks at numbers"):
        tracing.trace(step, [torch.randn(100, dtype=torch.float64)])


def test_an_error_of_the_compiler_has_its_type_and_its_words(monkeypatch: pytest.MonkeyPatch):
    def broken(graph: object, arguments: object) -> None:
        raise FileNotFoundError("no compiler\nand more")

    monkeypatch.setattr("torch._inductor.compile", broken)
    x = torch.randn(7)
    with pytest.raises(tracing.NotTraceable, match=r"^TorchInductor: FileNotFoundError: no compiler$"):
        inductor.compiled(tracing.trace(long_twin, [x]), [x])


@pytest.mark.slow
def test_what_was_compiled_is_found_again():
    """PyTorch keeps compiled graphs on disk, where it knows all that they depend on."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    x = torch.randn(7)
    with fresh_cache():
        for kept in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
            torch.compiler.reset()
            before = counters["inductor"].copy()
            graph = inductor.compiled(tracing.trace(long_twin, [x]), [x])
            torch.testing.assert_close(graph(x)[0], long_twin(x)[0])
            found = {name for name, count in counters["inductor"].items() if count > before[name] and "fxgraph" in name}
            assert found == {kept}
