"""The samples of PyTorch's own list of modules, each between two linear layers."""

from __future__ import annotations

import os
import sys
import unittest
import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from models import CLASSES, INPUTS, Case, cross_entropy

BATCH = 3  # where a sample of the list has no batch, or a batch of one
DIMENSIONS = {  # of a batch, by the name of the module or its end; no entry: one
    "1d": 3, "2d": 4, "3d": 5, "BatchNorm1d": 2, "Linear": 2, "Bilinear": 2,
    "RNN": 3, "GRU": 3, "LSTM": 3, "RNNCell": 2, "GRUCell": 2, "LSTMCell": 2, "MultiheadAttention": 3,
    "Transformer": 3, "TransformerEncoder": 3, "TransformerEncoderLayer": 3, "TransformerDecoderLayer": 3,
}  # fmt: skip


@cache
def module_infos() -> dict[str, Any]:
    """Name -> `ModuleInfo`. The import leaves the settings of PyTorch and of hypothesis as they are."""
    stand_in = ModuleType("expecttest")  # a package for PyTorch's own tests; nothing of it is used here
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    others: dict[str, Any] = {"expecttest": stand_in, "hypothesis": None}
    before = {name: sys.modules[name] for name in others if name in sys.modules}
    sys.modules.update(others)
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ), mock.patch("torch.backends.disable_global_flags"):
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_modules import module_db
    finally:
        for name in others:
            del sys.modules[name]
        sys.modules.update(before)
    return {info.module_cls.__name__: info for info in module_db}


@dataclass(frozen=True)
class Made:
    """An input of the layer that the stem makes: its place, the dimension of the batch, the rest, and its range."""

    place: int
    dim: int
    shape: torch.Size
    low: float
    high: float


class Between(nn.Module):
    """stem -> layer -> head. What the stem does not make is constant, and comes with the batch."""

    def __init__(self, layer: nn.Module, leaves: list[Any], spec: TreeSpec, made: list[Made], dim: int) -> None:
        super().__init__()
        self.leaves, self.spec, self.made, self.dim = leaves, spec, made, dim
        self.sizes = [one.shape.numel() for one in made]
        self.stem = nn.Linear(INPUTS, sum(self.sizes)) if made else nn.Identity()
        name = type(layer).__name__
        self.layer, self.bounded = layer, "Loss" in name or name.startswith("LPPool")
        self.head: nn.Module = nn.Identity()

    def outputs(self, x: Tensor, *constants: Tensor) -> Tensor:
        """Of the layer, the batch first."""
        rest = iter(constants)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        parts = self.stem(x).split(self.sizes, 1) if self.made else ()
        for one, part in zip(self.made, parts, strict=True):
            if self.bounded:  # a probability or a variance remains one
                part = one.low + (one.high - one.low) * part.sigmoid()
            leaves[one.place] = part.view(-1, *one.shape).movedim(0, one.dim)
        args, kwargs = tree_unflatten(leaves, self.spec)
        out = tree_leaves(self.layer(*args, **kwargs))[0]
        return out.movedim(self.dim, 0) if out.dim() > 1 else out

    def forward(self, x: Tensor, *constants: Tensor) -> Tensor:
        return self.head(self.outputs(x, *constants).reshape(len(x), -1))


def made_of(leaves: list[Any], layer: nn.Module, dim: int, *, batched: bool) -> tuple[list[Made], set[int]]:
    """What the stem makes, and the sizes of its batches."""
    made, sizes, positive = [], set(), type(layer).__name__.startswith(("KLDiv", "LPPool"))  # the list has NaN there
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            own = 1 if isinstance(layer, nn.RNNBase) and place else dim  # a first state has layers first
            t = leaf.detach() if batched else leaf.detach().unsqueeze(own)
            low, high = (0.1, 0.9) if positive or not t.numel() else (float(t.min()), float(t.max()))
            made.append(Made(place, own, torch.Size([*t.shape[:own], *t.shape[own + 1 :]]), low, high))
            sizes.add(t.shape[own])
    return made, sizes


def with_batch(mask: Tensor) -> Tensor:
    """A mask of keys, or one for each head, for every sample; one of pairs holds for all."""
    return mask.expand(BATCH, -1) if mask.dim() == 1 else mask.repeat(BATCH, 1, 1) if mask.dim() == 3 else mask


def case_of(info: Any, sample: Any, *, training: bool) -> Case | None:
    """A sample as a network and a batch; None where it has no batch, or its output no row for each sample."""
    made_with, given, name = sample.constructor_input, sample.forward_input, info.module_cls.__name__
    layer = info.module_cls(*made_with.args, **made_with.kwargs).train(training)
    leaves, spec = tree_flatten((given.args, given.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    held = any(isinstance(leaf, Tensor) for leaf in tree_leaves(made_with.kwargs))
    batched = tensors[0].dim() >= (DIMENSIONS.get(name) or DIMENSIONS.get(name[-2:], 1))
    if any(isinstance(arg, PackedSequence) for arg in given.args) or (not batched and (held or "Loss" in name)):
        return None
    first = [m.batch_first for m in layer.modules() if hasattr(m, "batch_first")]
    dim = int(isinstance(layer, nn.CTCLoss) or (bool(first) and not first[0]))
    made, sizes = made_of(leaves, layer, dim, batched=batched)
    for one in made:
        leaves[one.place] = None
    if not batched:
        leaves = [with_batch(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    constants = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not batched or (sizes == {1} and not held and not constants):
        sizes = {BATCH}
    batch = sizes.pop() if sizes else len(constants[0])
    if sizes or batch == 0:
        return None
    model = Between(layer, leaves, spec, made, dim)
    inputs = (3 * torch.randn(batch, INPUTS), *constants)
    with torch.no_grad():
        out = model.outputs(*inputs)
    if out.dim() == 0 or len(out) != batch:
        return None
    model.head = nn.Linear(out[0].numel(), CLASSES)
    return Case(model, inputs, torch.randint(CLASSES, (batch,)), cross_entropy)


def cases(name: str) -> list[tuple[str, Case]]:
    """What to call it, and a network in float64, for the samples of a module that have a batch."""
    info, before, found = module_infos()[name], torch.get_default_dtype(), []
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            for training in (True, False)[: 1 + info.train_and_eval_differ]:
                like = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
                for number, sample in enumerate(info.module_inputs_func(info, **like)):
                    case = case_of(info, sample, training=training)
                    if case is not None:
                        found.append((f"{'training' if training else 'evaluation'} {number} {sample.desc}", case))
        finally:
            torch.set_default_dtype(before)
    return found
