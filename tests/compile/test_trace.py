"""Traces: what they hold in memory, and what they know of the numbers in a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.compile import compiler
from gradguess.compile import trace as tracing


def long_twin(x: Tensor) -> list[Tensor]:
    for _ in range(20):
        x = x.sin()
    return [x]


def test_an_error_of_the_compiler_has_its_type_and_its_words(monkeypatch: pytest.MonkeyPatch):
    def broken(graph: object, arguments: object) -> None:
        raise FileNotFoundError("no compiler\nand more")

    monkeypatch.setattr("torch._inductor.compile", broken)
    x = torch.randn(7)
    with pytest.raises(tracing.NotTraceable, match=r"^TorchInductor: FileNotFoundError: no compiler$"):
        compiler.compiled(tracing.trace(long_twin, [x]), [x])
