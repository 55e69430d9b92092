"""The zoo: small models, each with a feature that an estimator may trip over. Float64, seeded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg

BATCH, INPUTS, CLASSES = 5, 6, 4
LossFn = Callable[[Any, Any], Tensor]
cross_entropy = nn.CrossEntropyLoss(reduction="none")


@dataclass
class Case:
    """A model, its loss and one batch."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: LossFn = cross_entropy

    @property
    def args(self) -> tuple[LossFn, Any, Any]:
        return self.loss_fn, self.inputs, self.targets

    def outputs(self) -> Any:
        if isinstance(self.inputs, dict):
            return self.model(**self.inputs)
        return self.model(*self.inputs) if isinstance(self.inputs, tuple) else self.model(self.inputs)

    def losses(self) -> Tensor:
        return self.loss_fn(self.outputs(), self.targets)


def mlp(activation: type[nn.Module] = nn.ReLU, *, bias: bool = True, widths: tuple[int, ...] = (8, 7)) -> nn.Module:
    sizes = (INPUTS, *widths, CLASSES)
    layers: list[nn.Module] = []
    for below, above in itertools.pairwise(sizes):
        layers += [nn.Linear(below, above, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


class Calls(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """Modules and parameters by name, and a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 7), Block(7), Block(7), nn.LayerNorm(7), nn.Linear(7, CLASSES))


class Transformer(nn.Module):
    """Embedding, positions shared by the batch, one pre-norm layer, mean over tokens."""

    def __init__(self, vocabulary: int = 9, tokens: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(tokens, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


def branching() -> nn.Module:
    """Branches of unlike length that share a module and meet in a product, a sum and a concatenation."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.relu(m.stem(x))
        short, long = torch.relu(m.shared(x)), m.shared(torch.tanh(m.long(x)))
        return m.head(torch.cat([short * x, short + long], 1))

    parts = {"stem": nn.Linear(INPUTS, 7), "shared": nn.Linear(7, 7)}
    long = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
    return Net(run, **parts, long=long, head=nn.Linear(14, CLASSES))


def recurrent(kind: type[nn.RNNBase], batch_first: bool = True) -> nn.Module:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        out, state = m.rnn(x)
        last = state[0] if isinstance(state, tuple) else state
        return m.head(torch.tanh(out.mean(1 if batch_first else 0)) + last[0])

    return Net(run, rnn=kind(INPUTS, 5, batch_first=batch_first), head=nn.Linear(5, CLASSES))


def tied() -> nn.Module:
    """The embedding is also the output layer: a tied language model, one loss per sequence."""
    parts = {"embed": nn.Embedding(9, 6), "mix": nn.Linear(6, 6), "out": nn.Linear(6, 9, bias=False)}
    model = Net(lambda m, tokens: m.out(torch.tanh(m.mix(m.embed(tokens)))), **parts)
    model.out.weight = model.embed.weight
    return model


class BareParameters(nn.Module):
    """Scale, shift and a class token that are no modules, below a site, above all sites and between."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(7))
        self.a, self.b = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.rand(CLASSES) + 0.5)
        self.below = nn.Parameter(torch.randn(INPUTS))
        self.first, self.last = nn.Linear(INPUTS, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x * self.below) + self.token)
        return self.last(torch.tanh(x + (self.a + self.b))) * self.scale


class Repeats(nn.Module):
    """One layer called a number of times that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(INPUTS, 7), nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(times):
            x = torch.relu(self.again(x))
        return self.last(x)


def two_inputs() -> nn.Module:
    """Several inputs, several outputs, a dict among them."""

    def run(m: nn.Module, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(m.left(left) * m.right(right))
        return {"class": m.head(x), "value": m.side(x)}

    parts = {"left": nn.Linear(INPUTS, 7), "right": nn.Linear(3, 7)}
    return Net(run, **parts, head=nn.Linear(7, CLASSES), side=nn.Linear(7, 2))


def two_losses(outputs: dict[str, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(outputs["class"], targets[0]) + (outputs["value"] - targets[1]).square().mean(1)


def per_sequence(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4, CLASSES))


def frozen() -> nn.Module:
    model = mlp(widths=(8, 7, 6))
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def _vectors() -> Tensor:
    return torch.randn(BATCH, INPUTS)


def _classes() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


def _case(model: nn.Module, inputs: Any = None, targets: Any = None, loss_fn: LossFn = cross_entropy) -> Case:
    return Case(model, _vectors() if inputs is None else inputs, _classes() if targets is None else targets, loss_fn)


def _tokens() -> Tensor:
    return torch.randint(9, (BATCH, 6))


ZOO: dict[str, Callable[[], Case]] = {
    **{
        f"{activation.__name__.lower()}-{'bias' if bias else 'no-bias'}": (
            lambda activation=activation, bias=bias: _case(mlp(activation, bias=bias))
        )
        for activation in (nn.ReLU, nn.GELU, nn.Tanh)
        for bias in (True, False)
    },
    "cnn": lambda: _case(cnn(), torch.randn(BATCH, 2, 6, 6)),
    "residual": lambda: _case(residual()),
    "transformer": lambda: _case(Transformer(), _tokens()),
    "branching": lambda: _case(branching()),
    "lstm": lambda: _case(recurrent(nn.LSTM), torch.randn(BATCH, 4, INPUTS)),
    "gru": lambda: _case(recurrent(nn.GRU), torch.randn(BATCH, 4, INPUTS)),
    "gru-time-first": lambda: _case(recurrent(nn.GRU, batch_first=False), torch.randn(4, BATCH, INPUTS)),
    "tied": lambda: _case(tied(), _tokens(), _tokens(), per_sequence),
    "in-place": lambda: _case(
        nn.Sequential(
            nn.Linear(INPUTS, 8), nn.ReLU(inplace=True), nn.Linear(8, 7), nn.ELU(inplace=True), nn.Linear(7, CLASSES)
        )
    ),
    "dropout": lambda: _case(nn.Sequential(nn.Linear(INPUTS, 9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, CLASSES))),
    "batch-norm": lambda: _case(batch_norm(), torch.randn(BATCH, 2, 6)),
    "batch-norm-eval": lambda: _case(batch_norm().eval(), torch.randn(BATCH, 2, 6)),
    "frozen": lambda: _case(frozen()),
    "bare": lambda: _case(BareParameters()),
    "repeats": lambda: _case(Repeats()),
    "two-inputs": lambda: _case(
        two_inputs(), (_vectors(), torch.randn(BATCH, 3)), (_classes(), torch.randn(BATCH, 2)), two_losses
    ),
    "keywords": lambda: _case(
        two_inputs(),
        {"right": torch.randn(BATCH, 3), "left": _vectors()},
        (_classes(), torch.randn(BATCH, 2)),
        two_losses,
    ),
}

GUESSES: dict[str, gg.Guess | gg.methods.Method] = {
    "weight": gg.WeightPerturbation(),
    "activation": gg.ActivationPerturbation(),
    "wt": gg.WTranspose(),
    "svd": gg.WPerp(k=3, solver="svd"),
    "subspace": gg.WPerp(k=3, solver="subspace"),
    "shared": gg.WPerp(k=3, solver="shared"),
    "separable": gg.WPerp(k=4, solver="separable"),
    "svd-bottom": gg.WPerp(k=3, solver="svd", end="bottom"),
    "shared-bottom": gg.WPerp(k=3, solver="shared", end="bottom"),
    "ns": gg.WPerpNS(k=3),
    "ns-nearest": gg.WPerpNS(k=3, threshold="nearest"),
    "wp": gg.WPreconditioned(),
}
RIVALS: dict[str, gg.methods.Method] = {
    "dfa": gg.baselines.DFA(),
    "fdfa": gg.baselines.FDFA(momentum=0.5),
    "mezo": gg.baselines.MeZO(),
    "local-linear": gg.baselines.LocalLinear(),
    "checkpointed": gg.baselines.Checkpointed(),
}
STUDENTS: dict[str, gg.methods.Method] = {
    "students": gg.Students(form="chained", lr=1e-2),
    "students-error": gg.Students(signal="error", learn=("outputs", "chain", "tangents"), lr=1e-2),
    "local": gg.LocalGuess(lr=1e-2),
}
SITE_GUESSES = {name: guess for name, guess in GUESSES.items() if name != "weight"}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    """A case of the zoo; the global generator and default dtype are as before."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            return ZOO[name]()
        finally:
            torch.set_default_dtype(before)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
