"""Random networks × guess × options, each made from one integer. Float64, on a CPU, a few milliseconds to run.

`make_case(seed)` makes a case; `network_checks.check(case)` holds it against dense references.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradguess as gg
import models

Shape = tuple[int, ...]  # of one sample: (d,), (tokens, d), (channels, length) or (channels, height, width)


@dataclass
class Case(models.Case):
    """A model, one batch, a method and its options."""

    seed: int = 0
    method: Any = None
    sites: Any = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    features: set[str] = field(default_factory=set)  # what the network is made of, for expected refusals

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.method}, sites={self.sites!r}, {self.options}, {sorted(self.features)}, "
            f"training={self.model.training}\n{self.model}"
        )


# --- pieces of networks ----------------------------------------------------------------------------------------


class Function(nn.Module):
    """An elementwise function that is called as a function, hidden from module hooks by its name alone."""

    def __init__(self, name: str, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.call = name, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, weight: float = 1.0) -> None:
        super().__init__()
        self.inner, self.weight = inner, weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.weight == 1 else self.weight * x + self.inner(x)


class Join(nn.Module):
    """Two branches of one tensor, concatenated, added or multiplied."""

    def __init__(self, left: nn.Module, right: nn.Module, how: str, dim: int) -> None:
        super().__init__()
        self.left, self.right, self.how, self.dim = left, right, how, dim

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        if self.how == "cat":
            return torch.cat([a, b], self.dim)
        return a + b if self.how == "add" else a * torch.sigmoid(b)


class Scale(nn.Module):
    """A bare parameter that multiplies, adds or both, and perhaps by an in-place operation."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(1 + 0.3 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mul_":
            return (x * 1.0).mul_(self.scale)
        return x * self.scale if self.how == "mul" else x + self.scale


class Positions(nn.Module):
    """An embedding of the positions: one site that all samples share."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(self.tokens))


class Twice(nn.Module):
    """One module called twice, with something between."""

    def __init__(self, inner: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self.inner, self.between = inner, between

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.between(self.inner(x)))


class Tied(nn.Module):
    """Two linear layers that share one weight, the second transposed by hand or as a module."""

    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.first, self.by_hand = nn.Linear(width, width), by_hand
        if not by_hand:
            self.second = nn.Linear(width, width, bias=False)
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return F.linear(h, self.first.weight.t()) if self.by_hand else self.second(h)


class InPlace(nn.Module):
    """In-place operations on tensors that are the module's own, or on what a layer has read."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "after":  # the layer has read h before it is changed
            h = x * 1.0
            y = self.linear(h)
            h += 1.0
            return y + h
        y = self.linear(x)
        if self.how == "add":
            y += x
        elif self.how == "relu":
            F.relu_(y)
        else:
            y[..., :1] *= 2.0
        return y


class Returns(nn.Module):
    """A layer whose call returns a tuple or a dict; both tensors are used."""

    def __init__(self, width: int, kind: str, use: str) -> None:
        super().__init__()
        self.pair, self.use = _Pair(width, kind), use

    def forward(self, x: Tensor) -> Tensor:
        out = self.pair(x)
        a, b = (out["a"], out["b"]) if isinstance(out, dict) else out
        if self.use == "both":
            return a * torch.tanh(b)
        return a if self.use == "first" else b


class _Pair(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(2 * width, width) / width**0.5), kind

    def forward(self, x: Tensor) -> Any:
        a, b = F.linear(x, self.weight).chunk(2, -1)
        return {"a": a, "b": b} if self.kind == "dict" else (a, b)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, or its parts by hand around scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        if kind == "hand":
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        else:
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "hand":
            return self.attention(x, x, x, need_weights=self.kind == "weights")[0]
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Recurrent(nn.Module):
    """nn.RNN, nn.GRU or nn.LSTM; the sequence, or the sequence and the last state."""

    def __init__(self, kind: str, width: int, out: int, use_state: bool) -> None:
        super().__init__()
        self.rnn = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](width, out, batch_first=True)
        self.use_state = use_state

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x)
        if not self.use_state:
            return y
        last = state[1] if isinstance(state, tuple) else state
        return y + last[0][:, None]


class Unrolled(nn.Module):
    """A cell called once for each token."""

    def __init__(self, kind: str, width: int, out: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, out) if kind == "gru" else nn.LSTMCell(width, out)

    def forward(self, x: Tensor) -> Tensor:
        h, states = None, []
        for token in x.unbind(1):
            h = self.cell(token, h)
            states.append(h[0] if isinstance(h, tuple) else h)
        return torch.stack(states, 1)


class Pick(nn.Module):
    """From positions to one vector."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x.mean(1) if x.dim() == 3 else x.mean((2, 3))
        return x[:, -1] if self.how == "last" else x.flatten(1)


class TwoInputs(nn.Module):
    """Two inputs, a layer for each."""

    def __init__(self, a: int, b: int, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(a, width), nn.Linear(b, width)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) * 0.5 + torch.tanh(self.right(b))


class TimeFirst(nn.Module):
    """Inputs (time, batch, d): the batch is not the first dimension."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].transpose(0, 1)


class Network(nn.Module):
    """Entry, body, head; perhaps a parameter behind the head, something unused, and outputs in a container."""

    def __init__(
        self, entry: nn.Module, body: nn.Module, head: nn.Module, *, tail: bool, unused: bool, container: str
    ) -> None:
        super().__init__()
        self.entry, self.body, self.head, self.container = entry, body, head, container
        if unused:
            self.unused = nn.Linear(3, 3)
        if tail:
            self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.body(self.entry(*args, **kwargs))
        out = self.head(h)
        if hasattr(self, "temperature"):
            out = out * self.temperature
        if self.container == "tuple":
            return out, h
        return {"logits": out, "hidden": h} if self.container == "dict" else out


# --- the generator ---------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "relu": torch.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus 2": lambda x: F.softplus(x, beta=2.0, threshold=1.0),
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "hardtanh": lambda x: F.hardtanh(x, -0.7, 0.9),
    "square": torch.square,
    "sine": torch.sin,
    "relu6": F.relu6,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, 0.1),
    "tanh_": lambda x: (x * 1.0).tanh_(),
    "1 - x/2": lambda x: 1.0 - x / 2.0,
    "k - x": lambda x: torch.full_like(x, 0.5) - x,
    "k·x - k": lambda x: torch.full_like(x, 1.5) * x - torch.ones_like(x),
    "x/k": lambda x: x / torch.full_like(x, 1.7),
    "k/x": lambda x: torch.ones_like(x) / (2 + x.square()),
}
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.LeakyReLU,
    lambda: nn.LeakyReLU(0.3, inplace=True),
    nn.GELU,
    nn.Tanh,
    nn.SiLU,
    lambda: nn.SiLU(inplace=True),
    nn.Softplus,
    nn.Sigmoid,
    nn.ELU,
    lambda: nn.ELU(0.5, inplace=True),
    nn.Hardtanh,
    nn.Mish,
    nn.Hardswish,
    lambda: nn.Hardtanh(inplace=True),
    # at zero, which a ReLU gives, PyTorch's forward mode has the slope above the kink and its reverse mode that below
    lambda: nn.Sequential(Function("x + 0.01", lambda x: x + 0.01), nn.PReLU()),
    lambda: nn.Softmax(-1),
)


class Maker:
    """Composes a network. Everything comes from `self.r`, and weights from the global generator."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.features: set[str] = set()

    def width(self) -> int:
        return self.r.randint(2, 7)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def activation(self) -> nn.Module:
        if self.chance(0.4):
            name = self.r.choice(list(FUNCTIONS))
            return Function(name, FUNCTIONS[name])
        module = self.r.choice(ACTIVATIONS)()
        if getattr(module, "inplace", False):
            self.features.add("in place")
        return module

    def linear(self, a: int, b: int) -> nn.Module:
        layer: nn.Module = nn.Linear(a, b, bias=self.chance(0.7))
        kind = self.r.random()
        if kind < 0.08:
            self.features.add("parametrised")
            how = self.r.choice(("weight", "spectral", "orthogonal"))
            if how == "weight":
                layer = parametrizations.weight_norm(layer)
            elif how == "spectral":
                layer = parametrizations.spectral_norm(layer)
            else:
                layer = parametrizations.orthogonal(layer)
        elif kind < 0.15:
            self.features.add("frozen")
            layer.requires_grad_(False)
        elif kind < 0.18 and layer.bias is not None:
            layer.weight.requires_grad_(False)
        return layer

    def norm(self, shape: Shape) -> nn.Module:
        channels_first = self.kind in ("image", "signal")
        size = shape[0] if channels_first else shape[-1]
        kind = self.r.choice(("layer", "rms", "group", "batch"))
        affine = self.chance(0.8)
        if kind == "batch" and len(shape) == 1:
            self.features.add("batch norm")
            return nn.BatchNorm1d(size, affine=affine)
        if kind == "batch" and channels_first:
            self.features.add("batch norm")
            return (nn.BatchNorm2d if self.kind == "image" else nn.BatchNorm1d)(size, affine=affine)
        if kind == "group" and (channels_first or len(shape) == 1):
            positions = math.prod(shape[1:])  # PyTorch refuses one number for each group of one sample
            found = [g for g in range(1, size + 1) if size % g == 0 and (size > g or positions > 1)]
            return nn.GroupNorm(self.r.choice(found), size, affine=affine)
        whole = shape if channels_first else shape[-1:]
        if kind == "rms":
            return nn.RMSNorm(whole, eps=1e-3, elementwise_affine=affine)
        return nn.LayerNorm(whole, elementwise_affine=affine)

    def body(self, kind: str, shape: Shape, depth: int, level: int = 0) -> tuple[nn.Module, Shape]:
        """Some stages one after the other; the shape that they return."""
        self.kind = kind
        stages: list[nn.Module] = []
        for _ in range(depth):
            stage, shape = self.stage(kind, shape, level)
            self.kind = kind
            stages.append(stage)
        if level == 0 and len(stages) == 1 and self.chance(0.5):
            return stages[0], shape
        return nn.Sequential(*stages), shape

    def stage(self, kind: str, shape: Shape, level: int) -> tuple[nn.Module, Shape]:
        roll = self.r.random()
        if roll < 0.28:
            return self.activation(), shape
        if roll < 0.40:
            return self.norm(shape), shape
        if roll < 0.46:
            self.features.add("dropout")
            return nn.Dropout(0.3), shape
        if roll < 0.60 and level < 2:
            return self.branch(kind, shape, level)
        if roll < 0.65:
            size = (shape[0], *[1] * (len(shape) - 1)) if kind in ("image", "signal") else shape[-1:]
            return Scale(size, self.r.choice(("mul", "add", "mul_"))), shape
        if kind == "image":
            return self.convolution(2, shape)
        if kind == "signal":
            return self.convolution(1, shape)
        if kind == "tokens" and self.chance(0.5):
            return self.token_stage(shape)
        return self.vector_stage(shape)

    def branch(self, kind: str, shape: Shape, level: int) -> tuple[nn.Module, Shape]:
        """A residual branch, or two branches that meet."""
        if self.chance(0.6):
            inner, out = self.body(kind, shape, self.r.randint(1, 3), level + 1)
            if out != shape:
                inner = nn.Sequential(inner, self.adapter(kind, out, shape))
            return Residual(inner, self.r.choice((1.0, 1.0, 0.5))), shape
        left, a = self.body(kind, shape, self.r.randint(1, 2), level + 1)
        right, b = self.body(kind, shape, self.r.randint(1, 2), level + 1)
        dim = 1 if kind in ("image", "signal") else -1
        if kind in ("image", "signal") and a[1:] != b[1:]:
            right, b = nn.Sequential(right, self.adapter(kind, b, a)), a
        if self.chance(0.5):
            out = (a[0] + b[0], *a[1:]) if dim == 1 else (*a[:-1], a[-1] + b[-1])
            if out[0 if dim == 1 else -1] <= 10:
                return Join(left, right, "cat", dim), out
        if a != b:
            right = nn.Sequential(right, self.adapter(kind, b, a))
        return Join(left, right, self.r.choice(("add", "gate")), dim), a

    def adapter(self, kind: str, shape: Shape, wanted: Shape) -> nn.Module:
        if kind in ("image", "signal"):
            spatial = len(wanted) - 1
            conv = (nn.Conv2d if spatial == 2 else nn.Conv1d)(shape[0], wanted[0], 1)
            pool = (nn.AdaptiveAvgPool2d if spatial == 2 else nn.AdaptiveAvgPool1d)(
                wanted[1:] if spatial == 2 else wanted[1]
            )
            return nn.Sequential(pool, conv)
        return nn.Linear(shape[-1], wanted[-1])

    def vector_stage(self, shape: Shape) -> tuple[nn.Module, Shape]:
        """Stages for the last dimension, of vectors and tokens alike."""
        d = shape[-1]
        roll = self.r.random()
        if roll < 0.55:
            out = self.width()
            return self.linear(d, out), (*shape[:-1], out)
        if roll < 0.65:
            self.features.add("shared")
            return Twice(self.linear(d, d), self.activation()), shape
        if roll < 0.75:
            self.features.add("tied")
            return Tied(d, self.chance(0.5)), shape
        if roll < 0.85:
            how = self.r.choice(("after", "add", "relu", "part"))
            self.features.add("in place" if how != "after" else "changed input")
            return InPlace(d, how), shape
        return Returns(d, self.r.choice(("tuple", "dict")), self.r.choice(("both", "first", "second"))), shape

    def token_stage(self, shape: Shape) -> tuple[nn.Module, Shape]:
        t, d = shape
        roll = self.r.random()
        if roll < 0.4:
            self.features.add("attention")
            heads = self.r.choice([h for h in (1, 2, 3) if d % h == 0])
            return SelfAttention(d, heads, self.r.choice(("hand", "module", "weights"))), shape
        if roll < 0.6:
            out = self.r.randint(2, 4)
            kind, state = self.r.choice(("rnn", "gru", "lstm")), self.chance(0.4)
            return Recurrent(kind, d, out, state), (t, out)
        if roll < 0.8:
            out = self.r.randint(2, 4)
            return Unrolled(self.r.choice(("gru", "lstm")), d, out), (t, out)
        if roll < 0.9:
            return Positions(t, d), shape
        return Scale((t, d), "add"), shape

    def convolution(self, spatial: int, shape: Shape) -> tuple[nn.Module, Shape]:
        channels, size = shape[0], min(shape[1:])
        if size >= 2 and self.chance(0.15):
            pool = self.r.choice((nn.AvgPool2d, nn.MaxPool2d) if spatial == 2 else (nn.AvgPool1d, nn.MaxPool1d))(2)
            return pool, (channels, *[n // 2 for n in shape[1:]])
        out = self.r.randint(2, 4)
        groups = self.r.choice([g for g in (1, 1, 2, 3) if channels % g == 0 and out % g == 0])
        kernel = self.r.choice([k for k in (1, 2, 3) if k <= size])
        stride = self.r.choice((1, 1, 2))
        mode = self.r.choice(("zeros", "zeros", "reflect", "circular", "replicate"))
        padding: Any = self.r.choice((0, 1, 0, "same")) if size > 1 else 0
        if padding == "same":
            stride, kernel = 1, kernel if kernel % 2 else 1  # PyTorch warns of even ones
        if mode == "reflect" and padding and size < 3:
            mode = "zeros"
        kind = nn.Conv2d if spatial == 2 else nn.Conv1d
        layer = kind(channels, out, kernel, stride, padding, groups=groups, bias=self.chance(0.7), padding_mode=mode)
        grown = [n if padding == "same" else (n + 2 * padding - kernel) // stride + 1 for n in shape[1:]]
        return layer, (out, *grown)

    # --- the whole ---

    def entry(self, batch: int) -> tuple[nn.Module, Any, str, Shape]:
        """The first module, the inputs, and the kind and shape of what comes out."""
        kind = self.r.choice(
            ("vector", "vector", "chain", "tokens", "ids", "image", "signal", "pair", "dict", "time first")
        )
        d = self.width()
        if kind in ("vector", "chain"):
            first = (
                nn.Identity() if kind == "chain" else Function("copy", lambda x: x + 0.0)
            )  # stages may work in place
            return (first if self.chance(0.5) else nn.Linear(d, d)), torch.randn(batch, d), kind, (d,)
        if kind in ("pair", "dict"):
            a, b = torch.randn(batch, d), torch.randn(batch, 3)
            return TwoInputs(d, 3, d), ((a, b) if kind == "pair" else {"a": a, "b": b}), "vector", (d,)
        t = self.r.randint(2, 4)
        if kind == "tokens":
            return nn.Linear(d, d), torch.randn(batch, t, d), "tokens", (t, d)
        if kind == "ids":
            padding = self.r.choice((None, None, 0))
            layer = nn.Embedding(6, d, padding_idx=padding, scale_grad_by_freq=self.chance(0.1))
            if layer.scale_grad_by_freq:
                self.features.add("by frequency")
            if padding is not None:
                self.features.add("padding")
            return layer, torch.randint(6, (batch, t)), "tokens", (t, d)
        if kind == "time first":
            self.features.add("time first")
            t += t == batch  # which dimension is the batch cannot be seen where both are of one size
            return TimeFirst(d, 3), torch.randn(t, batch, d), "tokens", (t, 3)
        if kind == "image":
            layer, shape = self.convolution(2, (2, 4, 5))
            return layer, torch.randn(batch, 2, 4, 5), "image", shape
        layer, shape = self.convolution(1, (2, 6))
        return layer, torch.randn(batch, 2, 6), "signal", shape

    def chain(self, d: int) -> tuple[nn.Module, int]:
        """Linear layers and ReLUs in a row."""
        layers: list[nn.Module] = []
        for _ in range(self.r.randint(1, 3)):
            out = self.width()
            layers += [nn.Linear(d, out, bias=self.chance(0.7)), nn.ReLU(inplace=self.chance(0.2))]
            d = out
        return nn.Sequential(*layers), d

    def network(self, batch: int) -> tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]:
        """A model with its inputs, targets and loss."""
        entry, inputs, kind, shape = self.entry(batch)
        if kind == "chain":
            body, width = self.chain(shape[0])
            classes = self.r.randint(2, 4)
            model: nn.Module = nn.Sequential(entry, body, nn.Linear(width, classes))
            if self.chance(0.3):
                model = nn.Sequential(*entry.modules(), *body, nn.Linear(width, classes))
            return model, inputs, torch.randint(classes, (batch,)), _Loss("cross entropy", "plain")
        body, shape = self.body(kind, shape, self.r.randint(0, 4))
        self.kind = kind
        classes, per_token = self.r.randint(2, 4), False
        if kind == "tokens" and self.chance(0.35):
            head: nn.Module = nn.Linear(shape[-1], classes)
            per_token = True
        elif kind in ("vector", "chain"):
            head = nn.Linear(shape[0], classes)
        else:
            how = self.r.choice(("mean", "last", "flat")) if kind == "tokens" else self.r.choice(("mean", "flat"))
            if kind == "signal":
                how = "flat"
            size = shape[-1] if kind == "tokens" else shape[0]
            head = nn.Sequential(Pick(how), nn.Linear(math.prod(shape) if how == "flat" else size, classes))
        container = self.r.choice(("plain", "plain", "plain", "tuple", "dict"))
        tail, unused = self.chance(0.15), self.chance(0.1)
        if tail:
            self.features.add("tail")
        model = Network(entry, body, head, tail=tail, unused=unused, container=container)
        loss = self.r.choice(("cross entropy", "squares", "custom"))
        shape_out = (batch, shape[0], classes) if per_token else (batch, classes)
        targets = torch.randint(classes, shape_out[:-1]) if loss == "cross entropy" else torch.randn(shape_out)
        return model, inputs, targets, _Loss(loss, container)


class _Loss:
    """One loss per sample; positions are averaged. The custom one uses a second output where there is one."""

    def __init__(self, kind: str, container: str) -> None:
        self.kind, self.container = kind, container

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        out, hidden = outputs, None
        if self.container == "tuple":
            out, hidden = outputs
        elif self.container == "dict":
            out, hidden = outputs["logits"], outputs["hidden"]
        if self.kind == "cross entropy":
            losses = F.cross_entropy(out.flatten(0, -2), targets.flatten(), reduction="none")
            return losses.view(len(targets), -1).mean(1)
        if self.kind == "squares":
            return (out - targets).square().flatten(1).mean(1)
        losses = torch.log(torch.cosh(out - targets)).flatten(1).sum(1)
        return losses if hidden is None else losses + 0.1 * hidden.square().flatten(1).mean(1)


def make_method(r: random.Random) -> Any:
    """Any of the methods."""

    def guess() -> gg.Guess:
        k = r.randint(1, 5)
        return r.choice(
            (
                gg.ActivationPerturbation,
                gg.WTranspose,
                gg.WPreconditioned,
                lambda: gg.WPerp(k=k),
                lambda: gg.WPerp(k=k, solver="svd"),
                lambda: gg.WPerp(k=k, solver="subspace"),
                lambda: gg.WPerp(k=k, solver=r.choice(("svd", "subspace", "shared")), end="bottom"),
                lambda: gg.WPerpNS(k=k, threshold=r.choice(("placed", "nearest"))),
            )
        )()

    roll = r.random()
    if roll < 0.58:
        return guess()
    if roll < 0.64:
        return gg.WeightPerturbation()
    if roll < 0.68:
        return gg.Backprop()
    form = r.choice(("direct", "chained", "chained", "corrected"))
    fraction = r.choice((1.0, 1.0, 1.0, 0.5))
    bootstrap = r.choice((0.0, 0.0, 0.0, 0.3))
    return gg.Feedback(guess(), form=form, sweeps=r.randint(1, 3), bootstrap=bootstrap, fraction=fraction)


def make_sites(r: random.Random, model: nn.Module) -> Any:
    roll = r.random()
    if roll < 0.45:
        return r.choice(("auto", "auto", "branch"))
    if roll < 0.75:
        return "leaf"
    if roll < 0.85:
        return r.randint(1, 3)
    names = [name for name, _ in model.named_modules() if name and "parametrizations" not in name]
    return r.sample(names, min(len(names), r.randint(1, 3)))


def make_case(seed: int) -> Case:
    """The case of a seed. The global random state is left as it was."""
    r = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            maker = Maker(r)
            model, inputs, targets, loss_fn = maker.network(r.randint(2, 6))
            model.train(r.random() < 0.5 and (len(targets) > 2 or "batch norm" not in maker.features))
            method, sites = make_method(r), make_sites(r, model)
            if not any(p.requires_grad for p in model.parameters()):
                next(model.parameters()).requires_grad_(True)
        finally:
            torch.set_default_dtype(before)
    options: dict[str, Any] = {}
    if r.random() < 0.4:
        options["tangents"] = r.randint(2, 6)
    if r.random() < 0.25:
        options["isolate"] = True
    if r.random() < 0.25:
        options["balance"] = True
    if r.random() < 0.2:
        options["coupling"] = "batch"
    return Case(model, inputs, targets, loss_fn, seed, method, sites, options, maker.features)
