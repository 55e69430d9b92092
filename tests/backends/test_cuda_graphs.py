"""Without a GPU nothing is recorded: the same code, called at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.backends.cuda_graphs import CannotRecord, Recording, on_side_stream


class FakeGraph:
    """What `Recording` asks of a CUDA graph."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.log.append(generator)

    def replay(self) -> None:
        self.log.append("replay")

    def pool(self) -> object:
        return self

    def __enter__(self) -> None:
        self.log.append("start")

    def __exit__(self, *_: object) -> None:
        self.log.append("end")


def test_a_recording_casts_weights_by_itself_and_leaves_no_casts_behind(monkeypatch):
    """Autocast keeps what it has cast; while a recording is made nothing is computed."""
    graph, weight, x = FakeGraph(), torch.nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda g, pool: g)
    seen = []

    def step() -> None:
        seen.append(torch.nn.functional.linear(x, weight).detach()[0, 0].item())
        weight.data += 1

    def failing() -> None:
        step()
        raise CannotRecord

    with torch.autocast("cpu", torch.bfloat16):
        step()
        step()
        Recording(step)
        with pytest.raises(CannotRecord):
            Recording(failing)
        step()
    assert seen == [2, 2, 6, 8, 10]  # the second step is PyTorch's own: one cast for all that is done under autocast


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recording_draws_what_calls_would_draw():
    device = torch.device("cuda")

    def draws(recorded: bool) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.ones(4, device=device)

        def function() -> Tensor:
            return x * torch.randn(4, generator=generator, device=device)

        on_side_stream(function)
        call = Recording(function, generator).replay if recorded else function
        return [call().clone() for _ in range(3)]

    for a, b in zip(draws(True), draws(False), strict=True):
        assert torch.equal(a, b)
