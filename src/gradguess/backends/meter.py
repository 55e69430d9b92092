"""What running something takes: seconds, and the peak of memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], object]


def seconds(run: Run, device: torch.device) -> float:
    """The time until the device has nothing left to do."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """The most memory that tensors take at a time, above what they took before. None where nobody counts it.

    On a CUDA device it is what PyTorch's allocator counts, whose own peak starts anew. On a CPU it is the size of all
    tensors that operators return, as long as they live; what an operator takes and frees inside itself is not seen.
    """
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    with _Counted() as counted:
        run()
    return counted.peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Counted(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and True would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, new=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._note(leaf, new=True)
        return out

    def _note(self, leaf: Any, *, new: bool) -> None:
        """Count the memory of a tensor until it is freed. What was there before the first operator is not new."""
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return
        if leaf.layout is torch.sparse_coo:
            self._note(leaf._indices(), new=new)
            leaf = leaf._values()
        if leaf.layout is not torch.strided:
            return  # it has no memory of its own that one can ask for
        storage = leaf.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self.alive:
            return

        def freed(_: object) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
