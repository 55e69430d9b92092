"""What code that knows no device is told about one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_TURN = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, for one thread at a time. PyTorch has one level of dual numbers, one set of switches for its
    kernels and one global generator for each device, and a step uses them: the steps of other threads wait.
    """

    @wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TURN:
            return function(*args, **kwargs)

    return waiting


def collective_device(backend: str) -> str:
    """Where the tensors of a collective of torch.distributed must lie."""
    return "cuda" if backend == "nccl" else "cpu"


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast; nothing at all where there is none."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def kept_dtype(t: Tensor) -> torch.dtype:
    """In which `t` is kept from step to step: that of autocast, where its products are rounded to it anyway."""
    mixed = torch.is_autocast_enabled(t.device.type)
    return torch.get_autocast_dtype(t.device.type) if mixed and t.dtype == torch.float32 else t.dtype


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
