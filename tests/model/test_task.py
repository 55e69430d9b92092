"""A task puts other tensors in the place of a model's own, for one call."""

from __future__ import annotations

import torch
from torch import nn

from gradguess.model.task import Task


def squares(outputs, targets):
    return ((outputs - targets) ** 2).sum(1)


def test_a_module_with_two_names_and_tied_tensors_are_replaced_and_put_back():
    shared, tied = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    tied.weight = shared.weight
    model, x = nn.Sequential(shared, nn.Tanh(), shared, nn.BatchNorm1d(3).eval(), tied), torch.randn(4, 3)
    before = [*model.parameters(), *model.buffers()]
    zeros = {name: torch.zeros_like(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert not Task(model, squares, x, x).outputs(zeros).any()
    after = [*model.parameters(), *model.buffers()]
    assert len(after) == len(before)
    assert all(a is b for a, b in zip(after, before, strict=True))
