"""The state of random generators."""

from __future__ import annotations

import torch

from gradguess.backends.random import RandomState


def test_global_draws_are_noticed_and_taken_back():
    before = RandomState([torch.device("cpu")])
    assert not before.drew()
    first = torch.randn(3)
    assert before.drew()
    before.restore()
    assert not before.drew()
    assert torch.equal(torch.randn(3), first)
