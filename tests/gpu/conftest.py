"""Tests that need CUDA. They run with PyTorch and pytest alone: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    deterministic, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = deterministic
    torch.set_float32_matmul_precision(precision)
