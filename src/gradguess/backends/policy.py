"""Numbers by which code that knows no device chooses an algorithm or a size."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Preferences", "collective_device", "full_precision", "preferences", "resolution"]


@dataclass(frozen=True)
class Preferences:
    """What is cheap on a device.

    Attributes:
        free_columns: a product of a matrix with a block of up to so many columns costs as much as with fewer, since the
            time goes into reading the matrix. 0: every column costs.
        dense_gram: a dense Gram matrix for every sample, of its open units, beats products with the one matrix that
            all samples share.
        size_step: sizes of matrices of open units are multiples of this. A larger step means fewer different sizes, and
            so fewer recorded graphs; a smaller one less padding.
        replays_functions: `cuda_graphs.graphed` records functions and replays them. A graphed function that computes an
            intermediate result anew then beats one that keeps it outside.
        fused_losses: `elementwise.cross_entropy` has a kernel.
    """

    free_columns: int
    dense_gram: bool
    size_step: int
    replays_functions: bool
    fused_losses: bool


_CPU = Preferences(free_columns=0, dense_gram=False, size_step=8, replays_functions=False, fused_losses=False)
_CUDA = Preferences(free_columns=32, dense_gram=True, size_step=32, replays_functions=True, fused_losses=True)


def preferences(t: Tensor) -> Preferences:
    """What is cheap on the device of `t`. Any device but CUDA is treated as a CPU."""
    return _CUDA if t.is_cuda else _CPU


def collective_device(backend: str) -> str:
    """Where the tensors of a collective of torch.distributed must lie."""
    return "cuda" if backend == "nccl" else "cpu"


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast; nothing at all where there is none."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


_COARSE = {"tf32": 2.0**-10, "bf16": 2.0**-7}  # what float32 products round to where that is allowed


def resolution(t: Tensor, convolves: bool) -> float:
    """The relative rounding error of the products that make a tensor like `t`, the coarsest that is in use."""
    found = [torch.finfo(t.dtype).eps]
    if torch.is_autocast_enabled(t.device.type):
        found.append(torch.finfo(torch.get_autocast_dtype(t.device.type)).eps)
    if t.dtype == torch.float32:
        on: Any = torch.backends
        matmul, conv = (on.cuda.matmul, on.cudnn.conv) if t.is_cuda else (on.mkldnn.matmul, on.mkldnn.conv)
        found += [_COARSE.get(kernel.fp32_precision, 0.0) for kernel in ((matmul, conv) if convolves else (matmul,))]
    return max(found)
