"""The networks of the experiments, with PyTorch's own initialisation, drawn from an explicit generator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess_lab.data import Shape

Activation = Callable[[], nn.Module]
ACTIVATIONS: dict[str, Activation] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}
STAGES, BLOCKS = 4, 2  # of ResNet-18: each stage but the first halves the image and doubles the channels
HEAD = 16  # least features of an attention head
TEXT = ("charformer", "gpt", "llama")  # what reads nothing but text


def build(
    model: str, shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> nn.Module:
    """The network `model`, a function of this file.

    PyTorch draws initial weights from its global generator. While a network is built, that one starts from a seed that
    the given generator draws, or for a perceptron continues as the given one; afterwards it is as before.
    """
    if model != "gru" and (shape.kind == "text") != (model in TEXT):
        raise InputError(
            f"{model!r} does not read data of kind {shape.kind!r}: {', '.join(TEXT)} and gru are for text."
        )
    if model not in ("mlp", "residual"):
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator.get_state())
        made: nn.Module = globals()[model](shape, width, depth, bias, ACTIVATIONS[activation])
        return made


def mlp(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """The paper's network: `depth` hidden layers of `width` units and a linear output layer."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape.size) > 1 else []
    for below, above in itertools.pairwise([shape.inputs] + [width] * depth):
        layers += [nn.Linear(below, above, bias), activation()]
    return nn.Sequential(*layers, nn.Linear(width, shape.classes, bias))


class Residual(nn.Module):
    """`x + branch(x)` for each branch in turn."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return x


class Bypassed(nn.Module):
    """`above(skip(x) + upper(lower(x)))`. The skip is called between the two; it is the identity if none is given."""

    def __init__(self, lower: nn.Module, upper: nn.Module, skip: nn.Module | None, above: nn.Module) -> None:
        super().__init__()
        self.lower, self.upper, self.skip, self.above = lower, upper, skip or nn.Identity(), above

    def forward(self, x: Tensor) -> Tensor:
        branch = self.lower(x)
        return self.above(self.skip(x) + self.upper(branch))


def residual(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A residual MLP: `depth` pre-norm blocks of `width` units between a stem and a head."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape.size) > 1 else []
    blocks = []
    for _ in range(depth):
        inner, outer = nn.Linear(width, width), nn.Linear(width, width)
        blocks.append(Residual(nn.Sequential(nn.LayerNorm(width), inner, activation(), outer)))
    stem, head = nn.Linear(shape.inputs, width), nn.Linear(width, shape.classes)  # drawn after the blocks
    return nn.Sequential(*layers, stem, *blocks, nn.LayerNorm(width), head)


class AsImage(nn.Module):
    """Give a signal (batch, length) its one channel; images pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x


class Head(nn.Module):
    """Mean over positions, then a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).mean(2))


def channels(shape: Shape) -> int:
    return shape.size[0] if shape.kind == "image" else 1


def conv(shape: Shape, below: int, above: int, size: int, stride: int = 1, **options: Any) -> nn.Module:
    kind = nn.Conv2d if shape.kind == "image" else nn.Conv1d
    return kind(below, above, size, stride, **{"padding": size // 2} | options)


def cnn(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """`depth` convolutions of stride 2 with `width`, then 2 `width`, from then on 4 `width` channels; a linear head."""
    layers: list[nn.Module] = [AsImage()] if shape.kind == "signal" else []
    below, side = channels(shape), shape.size[-1]
    for i in range(depth):
        above = width * min(2**i, 4)
        layers += [conv(shape, below, above, 3, 2), activation()]
        below, side = above, (side + 1) // 2
    positions = side**2 if shape.kind == "image" else side
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(below * positions, shape.classes))


def group_norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(next(groups for groups in (8, 4, 2, 1) if width % groups == 0), width)


def resnet(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A stem and `depth` pre-activation blocks of two convolutions; every second one halves the image, twice at most.

    `width` channels at first, doubled where the image is halved. The norms are group norms.
    """
    layers: list[nn.Module] = [AsImage()] if shape.kind == "signal" else []
    layers.append(conv(shape, channels(shape), width, 3))
    for i in range(depth):
        stride, below = 2 if i in (1, 3) else 1, width
        width *= stride
        lower = nn.Sequential(group_norm(below), activation(), conv(shape, below, width, 3, stride))
        upper = nn.Sequential(group_norm(width), activation(), conv(shape, width, width, 3))
        skip = conv(shape, below, width, 1, stride) if stride > 1 else None
        layers.append(Bypassed(lower, upper, skip, nn.Identity()))
    return nn.Sequential(*layers, group_norm(width), activation(), Head(width, shape.classes))


def convolved(shape: Shape, below: int, above: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without a bias, and its batch norm."""
    norm = nn.BatchNorm2d if shape.kind == "image" else nn.BatchNorm1d
    return conv(shape, below, above, size, stride, bias=False), norm(above)


def resnet18(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) as it is used on CIFAR-10: a 3 × 3 stem, no pooling before the head, batch norm.

    A stem, four stages of two residual blocks, a linear head: 11.17 million parameters with `width` 64. `depth` is not
    read: there are always eight blocks. `sites=4` cuts at the stages, `sites=8` at the blocks.
    """
    layers = [AsImage(), *convolved(shape, channels(shape), width, 3), activation()]
    for stage, block in itertools.product(range(STAGES), range(BLOCKS)):
        stride, below = 2 if stage > 0 and block == 0 else 1, width
        width *= stride
        first = *convolved(shape, below, width, 3, stride), activation()
        branch = nn.Sequential(*first, *convolved(shape, width, width, 3))
        skip = nn.Sequential(*convolved(shape, below, width, 1, stride)) if stride > 1 else None
        layers.append(Bypassed(branch, nn.Identity(), skip, activation()))
    return nn.Sequential(*layers, Head(width, shape.classes))


class Embedded(nn.Module):
    """Characters of a text, or patches of an image or a signal: (batch, tokens, width), with a learned position.

    The side of a patch is the largest of 4, 2 and 1 that divides the sample's side into at least four, or else 1.
    """

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.text, self.tokens, self.as_image = shape.kind == "text", shape.size[-1], AsImage()
        if self.text:
            self.embed: nn.Module = nn.Embedding(shape.classes, width)
        else:
            sides = (size for size in (4, 2) if self.tokens % size == 0 and self.tokens // size >= 4)
            side = next(sides, 1)
            self.embed = conv(shape, channels(shape), width, side, side, padding=0)
            self.tokens = (self.tokens // side) ** (2 if shape.kind == "image" else 1)
        self.position = nn.Parameter(0.02 * torch.randn(self.tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embed(x) if self.text else self.embed(self.as_image(x)).flatten(2).mT
        return found + self.position[: found.shape[1]]


class Tokens(nn.Module):
    """Embedded tokens, `depth` blocks, a norm and a linear head: on each character of a text, else on the mean.

    `block` makes a block for so many tokens.
    """

    def __init__(self, shape: Shape, width: int, depth: int, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedded = Embedded(shape, width)
        self.blocks = nn.Sequential(*(block(self.embedded.tokens) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedded(x)))
        return self.head(x if self.embedded.text else x.mean(1))


def perceptron(width: int, factor: int, activation: Activation) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Two layers, the inner one `factor` times as wide."""
    return nn.Linear(width, factor * width), activation(), nn.Linear(factor * width, width)


class AcrossTokens(nn.Sequential):
    """A chain on the other axis: (batch, tokens, features), each feature by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Attention(nn.Module):
    """Multi-head self-attention, causal or not."""

    def __init__(self, width: int, causal: bool, heads: int = 0) -> None:
        super().__init__()
        fitting = (n for n in (4, 2, 1) if (width % n == 0 and width // n >= HEAD) or n == 1)
        self.causal, self.heads = causal, heads or next(fitting)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.project_in(x).split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (batch, heads, tokens, features)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def attention_block(width: int, activation: Activation, causal: bool, heads: int = 0) -> Residual:
    """`x + attention(norm x)`, then `x + perceptron(norm x)`."""
    return Residual(
        nn.Sequential(nn.LayerNorm(width), Attention(width, causal, heads)),
        nn.Sequential(nn.LayerNorm(width), *perceptron(width, 4, activation)),
    )


def mixer(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """An MLP-mixer: `depth` blocks on patches of `width` features."""

    def block(tokens: int) -> nn.Module:
        return Residual(
            nn.Sequential(nn.LayerNorm(width), AcrossTokens(*perceptron(tokens, 2, activation))),
            nn.Sequential(nn.LayerNorm(width), *perceptron(width, 2, activation)),
        )

    return Tokens(shape, width, depth, block)


def vit(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """A small vision transformer: `depth` pre-norm blocks of `width` features."""
    return Tokens(shape, width, depth, lambda tokens: attention_block(width, activation, causal=False))


def charformer(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """A causal character transformer: `depth` blocks of `width` features; (batch, characters, alphabet)."""
    model = Tokens(shape, width, depth, lambda tokens: attention_block(width, activation, causal=True))
    nn.init.normal_(model.embedded.embed.weight, std=0.1)  # type: ignore[arg-type]
    return model


def gpt(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """The character transformer with heads of 64 features, as in GPT-2."""
    return Tokens(shape, width, depth, lambda tokens: attention_block(width, activation, True, max(1, width // 64)))


class Rotary(nn.Module):
    """Causal self-attention with rotary positions, in which four heads of 64 share keys and values."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.size = min(64, width)
        self.sizes = width, *[self.size * max(1, width // self.size // 4)] * 2
        self.project_in, self.project_out = nn.Linear(width, sum(self.sizes), False), nn.Linear(width, width, False)
        angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.arange(0, 1, 2 / self.size))
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.project_in(x).split(self.sizes, -1)
        )
        q, k = (self.turned(t) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.project_out(mixed.transpose(1, 2).flatten(2))

    def turned(self, t: Tensor) -> Tensor:
        cos, sin = self.turn[:, : t.shape[2]].to(t.dtype)  # type: ignore[index]
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Gated(nn.Module):
    """SwiGLU: `W (silu(U x) ∘ V x)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 48 * 16
        self.gate, self.up, self.down = (nn.Linear(*n, False) for n in [(width, inner)] * 2 + [(inner, width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def llama(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """Llama (Touvron et al. 2023) with shared keys and values; its activation is SiLU."""
    layers: list[nn.Module] = [nn.Embedding(shape.classes, width)]
    for _ in range(depth):
        parts = Rotary(width, shape.size[0]), Gated(width)
        layers.append(Residual(*(nn.Sequential(nn.RMSNorm(width), part) for part in parts)))
    return nn.Sequential(*layers, nn.RMSNorm(width), nn.Linear(width, shape.classes, False))


class Recurrent(nn.Module):
    """GRU layers and a linear head: at every character of a text, else after the last time step.

    A signal is read number by number, an image row by row.
    """

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__()
        self.text = shape.kind == "text"
        self.embed = nn.Embedding(shape.classes, width) if self.text else nn.Identity()
        inputs = width if self.text else shape.size[-1] if shape.kind == "image" else 1
        sizes = [inputs] + [width] * (depth - 1)
        self.layers = nn.ModuleList(nn.GRU(size, width, batch_first=True) for size in sizes)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not self.text:  # (batch, time, features)
            x = x.unsqueeze(-1) if x.dim() == 2 else x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x if self.text else x[:, -1])


def gru(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Recurrent:
    """`depth` recurrent layers of `width` units."""
    return Recurrent(shape, width, depth)
