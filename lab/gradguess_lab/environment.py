"""Where a result was measured: versions, device, memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gradguess.errors import InputError


@cache
def source() -> dict[str, Any]:
    """The commit of the code that runs, and whether the files are those of the commit.

    A copy without its repository says so by the environment variable GRADGUESS_COMMIT, "<commit>" or "<commit>-dirty".
    Unknown otherwise.
    """
    named = os.environ.get("GRADGUESS_COMMIT")
    if named:
        commit, _, dirty = named.partition("-")
        return {"commit": commit, "clean": not dirty}
    here = Path(__file__).resolve().parents[2]  # the folder that holds src and lab
    if not (here / ".git").exists():
        return {"commit": None, "clean": None}
    head = _git(here, "rev-parse", "HEAD")
    changes = _git(here, "status", "--porcelain", "--", "src", "lab", "pyproject.toml")
    return {"commit": head, "clean": None if changes is None else not changes}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_device(device: str) -> None:
    """Refuse a device that this PyTorch does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def use_threads(threads: int) -> None:
    """So many of PyTorch; 0: as many as it takes by itself."""
    if threads:
        torch.set_num_threads(threads)


def describe(device: str) -> dict[str, Any]:
    """The environment record of a result."""
    cuda = torch.device(device).type == "cuda"
    try:
        installed = version("gradguess")
    except PackageNotFoundError:
        installed = "source"  # a bare source tree
    return {
        "gradguess": installed,
        **source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if cuda else torch.device(device).type,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def resident_kilobytes(peak: bool = False) -> int:
    """The memory of this process that is resident, or was at most; always the latter where Linux does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:" if peak else "VmRSS:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _give_back_freed_memory() -> None:
    """Without this, a run would fill the memory that earlier ones in this process freed, and seem to need none."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Growth of the peak memory since construction, in MB: tensors on a GPU, resident set on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.device = device
        _give_back_freed_memory()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:  # Linux can forget the peak of what ran before in this process
            Path("/proc/self/clear_refs").write_text("5")
            self.start = resident_kilobytes()
        except OSError:
            self.start = resident_kilobytes(peak=True)

    def megabytes(self) -> float:
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return max(0, resident_kilobytes(peak=True) - self.start) / 2**10
