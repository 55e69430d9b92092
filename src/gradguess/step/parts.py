"""One batch in several parts: chunks of it one after another (`chunk=`), or a part in each process (`group=`).

The estimate is that of the whole batch, up to rounding, however it is split: noise is tied to a sample's place in the
whole batch (`Noise.at`), not to its chunk or rank. What is read off the batch as a whole is added up over its parts:
the gates' moments that a shared basis is found from, the scales of balanced directions, the lessons of learned
feedback. Bases are rank 0's. All ranks could compute them from the pooled moments, but two machines may round a
factorisation differently. Then the processes would average estimates from different subspaces. A broadcast every
`refresh` steps avoids that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradguess.backends.policy import collective_device
from gradguess.errors import InputError
from gradguess.model.site import Layout
from gradguess.model.task import Task


class Pool:
    """The processes that share a batch. Here it is one; `Processes` are several."""

    rank, size = 0, 1

    def sum(self, t: Tensor) -> Tensor:
        """The sum of every process's `t`."""
        return t

    def norm(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """The length of all processes' parts of a vector."""
        return torch.linalg.vector_norm(t, dtype=dtype)

    def agree(self, tensors: list[Tensor]) -> None:
        """Overwrite with rank 0's."""

    def counts(self, batch: int) -> list[int]:
        """Every process's number of samples."""
        return [batch]

    def gather(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Every process's list, by rank."""
        return [tensors]


class Processes(Pool):
    """A process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        self.dist, self.group = distributed, group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def sum(self, t: Tensor) -> Tensor:
        total = t.detach().clone()
        self.dist.all_reduce(total, group=self.group)
        return total

    def norm(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.sum(torch.linalg.vector_norm(t, dtype=dtype).square()).sqrt()

    def agree(self, tensors: list[Tensor]) -> None:
        root = self.dist.get_global_rank(self.group, 0)
        for t in tensors:
            whole = t.detach().contiguous()
            self.dist.broadcast(whole, root, group=self.group)
            if whole.data_ptr() != t.data_ptr():
                t.detach().copy_(whole)

    def counts(self, batch: int) -> list[int]:
        own = torch.tensor([batch], device=collective_device(self.dist.get_backend(self.group)))
        every = [torch.zeros_like(own) for _ in range(self.size)]
        self.dist.all_gather(every, own, group=self.group)
        return [int(n) for n in every]

    def gather(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        every: list[list[Tensor]] = [[] for _ in range(self.size)]
        self.dist.all_gather_object(every, [t.cpu() for t in tensors], group=self.group)
        return every


ALONE = Pool()


def pool_of(group: Any, model: nn.Module) -> Pool:
    """The processes to share with: `group`, or all of them where torch.distributed runs, or none."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError("model: pass model.module, not the DistributedDataParallel wrapper.")
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        if group is not None:
            raise InputError("group: torch.distributed is not initialised. Call init_process_group() first.")
        return ALONE
    group = distributed.group.WORLD if group is None else group
    if distributed.get_rank(group) < 0:
        raise InputError("group: this process is not a member of the group.")
    return Processes(group) if distributed.get_world_size(group) > 1 else ALONE


def add_up(pool: Pool, grads: Mapping[str, Tensor], all_finite: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Every process's gradients summed, and whether all were finite: one message for each dtype."""
    by_type: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, grad in grads.items():
        by_type.setdefault((grad.dtype, grad.device), []).append(name)
    summed: dict[str, Tensor] = {}
    for (dtype, device), names in by_type.items():
        bad = (~all_finite).to(device, dtype).reshape(1)
        flat = pool.sum(torch.cat([bad, *(grads[name].reshape(-1) for name in names)]))
        all_finite = flat[0] == 0
        pieces = flat[1:].split([grads[name].numel() for name in names])
        summed.update({n: piece.view(grads[n].shape) for n, piece in zip(names, pieces, strict=True)})
    return summed, all_finite


@dataclass(frozen=True)
class Part:
    """Some rows of the batch: `task` holds them; `rows` is their place among `total` samples (None: all there are)."""

    task: Task
    rows: slice | None
    total: int

    @property
    def share(self) -> float:
        """The weight of the part's mean in the mean of the whole."""
        return 1.0 if self.rows is None else (self.rows.stop - self.rows.start) / self.total


def samples(task: Task, layout: Layout) -> int:
    """The number of samples: the first dimension of the inputs, or of the targets where that is another."""
    tree = (task.inputs, task.targets) if layout.sliceable else (task.targets, task.inputs)
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        raise InputError("chunk or group: expected a tensor with one row per sample among the inputs or targets.")
    return int(leaves[0].shape[0])


def place_in(pool: Pool, batch: int, place: tuple[int, int] | None) -> tuple[int, int]:
    """(first row, total) of this process's samples in the batch of all processes."""
    if place is None:
        counts = pool.counts(batch)
        return sum(counts[: pool.rank]), sum(counts)
    first, total = place
    if not 0 <= first <= first + batch <= total:
        raise InputError(f"place: expected 0 <= first and first + {batch} <= total, found ({first}, {total}).")
    return first, total


def split(task: Task, layout: Layout, chunk: int | None, pool: Pool, place: tuple[int, int] | None) -> list[Part]:
    """The parts that this process runs, one after another."""
    if chunk is None and pool.size == 1 and place is None:
        return [Part(task, None, 0)]
    batch = samples(task, layout)
    if pool.size == 1 and place is None and (chunk is None or chunk >= batch):
        return [Part(task, None, 0)]
    first, total = place_in(pool, batch, place)
    bounds = list(_bounds(batch, total, chunk, pool))
    if len(bounds) > 1 and layout.sites and not layout.sliceable:
        raise InputError("chunk: the batch is not the first dimension of the inputs, so it cannot be cut.")
    return [
        Part(task if len(bounds) == 1 else task.part(slice(a, b), batch), slice(first + a, first + b), total)
        for a, b in bounds
    ]


def _bounds(batch: int, total: int, chunk: int | None, pool: Pool) -> Iterator[tuple[int, int]]:
    """Rows of the chunks. Processes must make the same number of them, since they exchange messages in each."""
    if chunk is None:
        yield 0, batch
    elif pool.size == 1:
        yield from ((a, min(a + chunk, batch)) for a in range(0, batch, chunk))
    else:
        number = math.ceil(math.ceil(total / pool.size) / chunk)
        if batch < number:
            raise InputError(f"chunk: {number} chunks for each process, but this one has {batch} samples.")
        yield from ((i * batch // number, (i + 1) * batch // number) for i in range(number))


def first_samples(task: Task, layout: Layout, pool: Pool, count: int) -> Task:
    """The first samples of the batch that the processes share, wherever they are: what bases are sketched on."""
    if pool.size == 1 or not layout.sliceable:
        return task
    batch = samples(task, layout)
    before = sum(pool.counts(batch)[: pool.rank])
    leaves, spec = tree_flatten((task.inputs, task.targets))
    cut = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch]
    every = pool.gather([leaves[i][: max(0, count - before)] for i in cut])
    for i, pieces in zip(cut, zip(*every, strict=True), strict=True):
        leaves[i] = torch.cat([piece.to(leaves[i].device) for piece in pieces])
    inputs, targets = tree_unflatten(leaves, spec)
    return replace(task, inputs=inputs, targets=targets)


def first_rows(task: Task, fraction: float) -> Task:
    """The first samples of a batch, a fraction of it and at least one."""
    return task if fraction == 1 else task.part(slice(max(1, round(fraction * task.batch))), task.batch)
