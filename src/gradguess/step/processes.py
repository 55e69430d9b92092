"""The processes that share a batch (`group=`), and what they tell each other.

What is read off the batch as a whole is added up over its parts: the gates' moments that a shared basis is found from,
the scales of balanced directions, the lessons of learned feedback. Bases are rank 0's. All ranks could compute them
from the pooled moments, but two machines may round a factorisation differently. Then the processes would average
estimates from different subspaces. A broadcast every `refresh` steps avoids that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradguess.backends.policy import collective_device
from gradguess.errors import InputError


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
