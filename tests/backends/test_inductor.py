"""How the compiler is set, on each device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combined

from gradguess.backends import inductor

CUDA = torch.device("cuda")


def kernel(*sizes: int) -> SimpleNamespace:
    return SimpleNamespace(group=(CUDA, sizes))


def test_only_small_kernels_are_started_together(monkeypatch: pytest.MonkeyPatch):
    small, long, large, library = kernel(64, 1), kernel(1, 2**20), kernel(64, 2**20), SimpleNamespace()
    other = SimpleNamespace(group=(CUDA, (("foreach",),)))
    own = staticmethod(lambda scheduler: [[small, large, library], [other, long]])
    monkeypatch.setattr(Combined, "group_algorithm_for_combo_kernels", own)
    before = Combined.group_algorithm_for_combo_kernels
    with inductor._combining():
        assert Combined.group_nodes_for_combo_kernels(None) == [[small], [long]]
    assert Combined.group_algorithm_for_combo_kernels is before
