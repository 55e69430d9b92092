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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was covered, by file."""
    files: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "gpu" in report.nodeid and (report.when == "call" or outcome != "passed"):
                found = files.setdefault(report.nodeid.split("::")[0].rsplit("/", 1)[-1], {})
                found[outcome] = found.get(outcome, 0) + 1
    if files and torch.cuda.is_available():
        terminalreporter.write_line(f"covered on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}:")
        for name, counts in sorted(files.items()):
            words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            terminalreporter.write_line(f"  {name.removeprefix('test_').removesuffix('.py')}: {words}")
