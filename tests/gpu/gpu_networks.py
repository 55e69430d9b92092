"""Small networks on CUDA, and the methods that are tried on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from models import Net

loss_fn = nn.CrossEntropyLoss(reduction="none")
INPUTS, CLASSES = 40, 10


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 96), nn.ReLU(), nn.Linear(96, 80, bias=False), nn.ReLU(), nn.Linear(80, CLASSES)
    )


def _written() -> nn.Module:
    """The same as a module of its own."""
    parts = {"a": nn.Linear(INPUTS, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, CLASSES)}
    return Net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), **parts)


def _residual() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x)
        return m.head(h + m.down(F.gelu(m.up(m.norm(h)))))

    parts = {"stem": nn.Linear(INPUTS, 48), "norm": nn.LayerNorm(48), "up": nn.Linear(48, 64)}
    return Net(run, **parts, down=nn.Linear(64, 48), head=nn.Linear(48, CLASSES))


def _convolution() -> nn.Module:
    convolutions = {"a": nn.Conv1d(1, 8, 5, stride=2), "b": nn.Conv1d(8, 12, 3, stride=2)}
    return Net(
        lambda m, x: m.head(F.relu(m.norm(m.b(F.relu(m.a(x[:, None]))))).flatten(1)),
        **convolutions,
        norm=nn.GroupNorm(4, 12),
        head=nn.Linear(12 * 8, CLASSES),
    )


def _attention() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.layer(m.stem(x.unflatten(1, (10, 4)))).mean(1)),
        stem=nn.Linear(4, 32),
        layer=nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True),
        head=nn.Linear(32, CLASSES),
    )


def _recurrent() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h, _ = m.stem(x.unflatten(1, (10, 4)))
        return m.head(torch.cat([m.cell(h[:, 4])[0], m.other(h[:, 9])], 1))

    cells = {"cell": nn.LSTMCell(12, 8), "other": nn.GRUCell(12, 8)}
    return Net(run, stem=nn.GRU(4, 12, batch_first=True), **cells, head=nn.Linear(16, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "written": _written,
    "residual": _residual,
    "convolution": _convolution,
    "attention": _attention,
    "recurrent": _recurrent,
}

METHODS: dict[str, Callable[[], Any]] = {
    "backprop": gg.Backprop,
    "weight": gg.WeightPerturbation,
    "activation": gg.ActivationPerturbation,
    "wt": gg.WTranspose,
    "wperp": lambda: gg.WPerp(refresh=7),
    "wperp-subspace": lambda: gg.WPerp(solver="subspace", refresh=7),
    "wperp-svd": lambda: gg.WPerp(solver="svd"),
    "wperp-bottom": lambda: gg.WPerp(end="bottom", refresh=7),
    "wperp-ns": lambda: gg.WPerpNS(refresh=7),
    "wp": gg.WPreconditioned,
    "direct": lambda: gg.Feedback(gg.WPerp(refresh=7), form="direct"),
    "chained": lambda: gg.Feedback(gg.WPerp(refresh=7), form="chained", bootstrap=0.1),
    "corrected": lambda: gg.Feedback(gg.WPerp(refresh=7), form="corrected"),
    "rare": lambda: gg.Feedback(gg.WPerp(refresh=3), form="chained", every=4, fraction=0.25),
}

PER_SAMPLE = ("wperp-subspace", "wperp-svd", "wperp-ns")  # dense or iterative for every sample: slow
CASES = [
    (network, method)
    for method in METHODS
    for network in NETWORKS
    if (method not in PER_SAMPLE or network in ("chain", "written"))
    and (network != "recurrent" or method in ("weight", "activation", "wt", "wperp", "chained"))
]


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The network of this name on CUDA, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name]().to("cuda", dtype)


def batch(rows: int = 200, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(rows, INPUTS, generator=source, dtype=torch.float64)
    return x.to("cuda", dtype), torch.randint(0, CLASSES, (rows,), generator=source).cuda()
