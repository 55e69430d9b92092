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


TOGETHER = {"test_processes.py", "test_memory.py", "test_torchrun.py", "test_browser.py", "test_agreement.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What these files prepare takes long: with several test processes (`--dist loadgroup`) one of them does it."""
    for item in items:
        if item.path.name in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
