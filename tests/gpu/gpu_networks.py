"""Small networks on CUDA, and the methods that are tried on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg

loss_fn = nn.CrossEntropyLoss(reduction="none")
INPUTS, CLASSES = 40, 10


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 96), nn.ReLU(), nn.Linear(96, 80, bias=False), nn.ReLU(), nn.Linear(80, CLASSES)
    )


class _Written(nn.Module):
    """The same as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(INPUTS, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(INPUTS, 48), nn.LayerNorm(48)
        self.up, self.down, self.head = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 8, 5, stride=2), nn.Conv1d(8, 12, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(4, 12), nn.Linear(12 * 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x[:, None]))
        return self.head(F.relu(self.norm(self.b(h))).flatten(1))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x.unflatten(1, (10, 4)))).mean(1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell = nn.GRU(4, 12, batch_first=True), nn.LSTMCell(12, 8)
        self.other, self.head = nn.GRUCell(12, 8), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.stem(x.unflatten(1, (10, 4)))
        return self.head(torch.cat([self.cell(h[:, 4])[0], self.other(h[:, 9])], 1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "written": _Written,
    "residual": _Residual,
    "convolution": _Convolution,
    "attention": _Attention,
    "recurrent": _Recurrent,
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
