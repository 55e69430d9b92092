"""The compiler chooses among kernels by timing them. Processes that get ready side by side must not do so at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

LOCK = "GRADGUESS_BENCH_LOCK"  # the variable that names the file which one process at a time holds


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """While open, this process holds the lock whenever it times kernels. Without a lock nothing is changed."""
    path = os.environ.get(LOCK)
    if path is None:
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # here, since it brings sympy

    own, file = CachingAutotuner.benchmark_all_configs, Path(path)

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            return own(self, *args, **kwargs)

    with patch.object(CachingAutotuner, "benchmark_all_configs", locked):
        yield
