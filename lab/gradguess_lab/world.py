"""The processes of a run under torchrun: `torchrun --nproc-per-node N -m gradguess train …`.

Rank 0 owns the directory; the others learn from it what it holds. A batch is cut into one piece per rank, and nothing
that is saved depends on their number, so a run may continue with more or fewer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from gradguess.errors import GradguessError, InputError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of this run."""

    rank: int = 0
    size: int = 1

    def own(self, batch: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        """This rank's samples of a batch, and their place in it."""
        if self.size == 1:
            return batch, None
        pieces = batch.tensor_split(self.size)
        return pieces[self.rank], (sum(map(len, pieces[: self.rank])), len(batch))

    def check_batches(self, samples: int, batch: int) -> None:
        """Every rank must have a sample in every batch."""
        least = min(batch, samples, samples % batch or batch)
        if least < self.size:
            raise InputError(
                f"{self.size} processes cannot share a batch of {least} samples: use fewer of them, or another --batch."
            )

    def total(self, number: float) -> float:
        """The sum over ranks."""
        if self.size == 1:
            return number
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        value = torch.tensor(number, dtype=torch.float64, device=device)
        distributed.all_reduce(value)
        return value.item()

    def from_first(self, get: Callable[[], T]) -> T:
        """Call `get` on rank 0. Every rank gets what it returns, or the error that it raises."""
        if self.size == 1:
            return get()
        found: list[Any] = [None, None]
        own: Exception | None = None
        try:
            found[0] = get() if self.rank == 0 else None
        except Exception as error:
            own, found[1] = error, str(error)
        distributed.broadcast_object_list(found)
        if found[1] is not None:
            raise own or GradguessError(f"rank 0: {found[1]}")
        return found[0]


ONE = World()  # a run in one process


@contextlib.contextmanager
def world(device: str) -> Iterator[World]:
    """Join the other ranks, where torchrun started this process; leave them at the end.

    The threads of the group must be gone before Python is: one that drops its last tensor while the interpreter ends
    aborts the process. They end with the last reference to the group.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or distributed.is_initialized():
        yield World(*((distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else ()))
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Imported once a group exists, this module would take it as the default of its functions, and hold it for ever.
    importlib.import_module("torch.distributed.nn")
    store, rank, size = next(distributed.rendezvous("env://"))
    # torchrun keeps its store when it restarts the ranks: addresses of dead ones must not be found in it
    store = distributed.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        distributed.destroy_process_group()
        gc.collect()  # a run refers to the group, and to itself
