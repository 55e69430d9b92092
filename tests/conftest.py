"""One thread and known seeds: timings are steady and failures repeat."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined: they then run on a CPU, step by step


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
