"""What other code is told about a device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gradguess.backends import preferences


def test_a_cpu_pays_for_every_column():
    cpu = preferences(torch.zeros(1))
    assert (cpu.free_columns, cpu.dense_gram, cpu.size_step, cpu.replays_functions) == (0, False, 8, False)


def test_a_gpu_reads_the_matrix_anyway():
    gpu = preferences(SimpleNamespace(is_cuda=True))
    assert (gpu.free_columns, gpu.dense_gram, gpu.size_step, gpu.replays_functions) == (32, True, 32, True)


def test_preferences_are_constants():
    with pytest.raises(dataclasses.FrozenInstanceError):
        preferences(torch.zeros(1)).size_step = 1
