"""Directions and the derivative become an estimate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from gradguess.step.base import Options
from gradguess.step.measure import Measurement


class Two:
    """Stands for a second process, whose derivatives add up to ten."""

    def sum(self, t: Tensor) -> Tensor:
        return t + 10


def test_samples_that_mix_have_the_derivative_of_all_processes_whatever_their_shares():
    """`ĝ = share y Σ c` over both: the share is this process's own, and the other's samples must not have it."""
    torch.manual_seed(0)
    model, x, t = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4), torch.randint(2, (5,))
    site = lay_out(Task(model, nn.CrossEntropyLoss(reduction="none"), x, t)).sites[0]
    c, y = torch.randn(1, 5), torch.randn(1, 5, 3)
    seen = Measurement(torch.zeros(5), c, None, [], [(0, None)])
    step: Any = SimpleNamespace(detail=True, options=Options(coupling="batch"), pool=Two())
    torch.testing.assert_close(seen.weigh(step, site, y, share=0.2), 0.2 * y[0] * (c.sum() + 10))
