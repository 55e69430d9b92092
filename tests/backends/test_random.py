"""The state of random generators."""

from __future__ import annotations

import torch

from gradguess.backends import RandomState, random
from gradguess.backends.random import generator_state


def test_a_generator_of_a_gpu_cannot_be_read_while_a_graph_is_recorded(monkeypatch):
    class Generator:
        device = torch.device("cuda")

        def get_state(self) -> str:
            return "state"

    assert generator_state(Generator()) == "state"
    monkeypatch.setattr(random, "recording", lambda: True)
    assert generator_state(Generator()) is None


def test_global_draws_are_noticed_and_taken_back():
    before = RandomState([torch.device("cpu")])
    assert not before.drew()
    first = torch.randn(3)
    assert before.drew()
    before.restore()
    assert not before.drew()
    assert torch.equal(torch.randn(3), first)
