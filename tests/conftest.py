"""One thread and known seeds: timings are steady and failures repeat."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed  # the whole of it notes a stack for each absent device
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined: they then run on a CPU, step by step


def pytest_ignore_collect(collection_path):
    """Helpers are imported by those who use them. Collected for doctests they would be imported twice, and an operation
    that one of them defines twice is freed while it is called (pytorch#197025: std::bad_alloc, now and then).
    """
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


def pytest_collection_finish():
    """PyTorch and ten thousand tests are here to stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
