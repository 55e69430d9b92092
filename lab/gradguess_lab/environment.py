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
from pathlib import Path
from typing import Any

import torch

import gradguess
from gradguess.errors import InputError


@cache
def source() -> dict[str, Any]:
    """The commit of the code that runs, and whether the files are those of the commit.

    A copy without its repository says so by the environment variable GRADGUESS_COMMIT, "<commit>" or "<commit>-dirty".
    Unknown otherwise.
    """
    named, here = os.environ.get("GRADGUESS_COMMIT", ""), Path(__file__).resolve().parents[2]  # which holds src and lab
    if not named and (here / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            changes = _git(here, "status", "--porcelain", "--", "src", "lab", "pyproject.toml")
            named = _git(here, "rev-parse", "HEAD") + "-dirty" * bool(changes)
    commit, _, dirty = named.partition("-")
    return {"commit": commit or None, "clean": not dirty if commit else None}


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def check_device(device: str) -> None:
    """Refuse a device that this PyTorch does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def describe(device: str) -> dict[str, Any]:
    """The environment record of a result."""
    cuda = torch.device(device).type == "cuda"
    return {
        "gradguess": gradguess.__version__,
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


class PeakMemory:
    """Growth of the peak memory since construction, in MB: tensors on a GPU, resident set on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.device = device
        # without this, a run would fill the memory that earlier ones in this process freed, and seem to need none
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)
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
