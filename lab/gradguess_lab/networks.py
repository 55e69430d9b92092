"""The networks of the experiments, with PyTorch's own initialisation, drawn from an explicit generator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess_lab.data import Shape
from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.names import lookup

Activation = Callable[[], nn.Module]
Build = Callable[[Shape, int, int, bool, Activation], nn.Module]
STAGES, BLOCKS = 4, 2  # of ResNet-18: each stage but the first halves the image and doubles the channels
HEAD = 16  # least features of an attention head


def network(reads: Literal["numbers", "text", "both"] = "numbers", direct: bool = False) -> Callable[[Build], Build]:
    """Make an entry of `MODELS` of a function (shape, width, depth, bias, activation) -> network.

    PyTorch draws initial weights from its global generator. While the network is built, that one continues as the given
    generator (`direct`), or from a seed that the given generator draws; afterwards it is as before.
    """

    def wrap(build: Build) -> Build:
        def drawn(
            shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
        ) -> nn.Module:
            if reads != "both" and (shape.kind == "text") != (reads == "text"):
                name = build.__name__
                raise InputError(f"{name!r} reads {reads}, not {shape.kind}: charformer and gru are for text.")
            make = lookup(ACTIVATIONS, activation, "activation")
            if not direct:
                generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.set_state(generator.get_state())
                return build(shape, width, depth, bias, make)

        return drawn  # type: ignore[return-value]

    return wrap


@network(direct=True)
def mlp(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """The paper's network: `depth` hidden layers of `width` units and a linear output layer."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape.size) > 1 else []
    for below, above in itertools.pairwise([shape.inputs] + [width] * depth):
        layers += [nn.Linear(below, above, bias), activation()]
    return nn.Sequential(*layers, nn.Linear(width, shape.classes, bias))


class Residual(nn.Module):
    """`x + branch(x)` for each branch in turn; a branch is a chain of modules with names."""

    def __init__(self, *branches: dict[str, nn.Module]) -> None:
        super().__init__()
        self.branches = [list(branch) for branch in branches]
        for name, module in itertools.chain(*(branch.items() for branch in branches)):
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for names in self.branches:
            branch = x
            for name in names:
                branch = getattr(self, name)(branch)
            x = x + branch
        return x


@network(direct=True)
def residual(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A residual MLP: `depth` pre-norm blocks of `width` units between a stem and a head."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape.size) > 1 else []
    blocks = []
    for _ in range(depth):
        inner, outer = nn.Linear(width, width), nn.Linear(width, width)
        branch = {"norm": nn.LayerNorm(width), "inner": inner, "activation": activation(), "outer": outer}
        blocks.append(Residual(branch))
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


@network()
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


class PreNormBlock(nn.Module):
    """`skip(x) + conv φ norm conv φ norm x`; the skip is a 1 × 1 convolution where the shape changes."""

    def __init__(self, shape: Shape, below: int, above: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.norm1, self.act1 = group_norm(below), activation()
        self.conv1 = conv(shape, below, above, 3, stride)
        self.norm2, self.act2 = group_norm(above), activation()
        self.conv2 = conv(shape, above, above, 3)
        self.skip = conv(shape, below, above, 1, stride) if stride > 1 or below != above else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(self.act1(self.norm1(x)))
        return self.skip(x) + self.conv2(self.act2(self.norm2(branch)))


@network()
def resnet(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A stem and `depth` pre-activation blocks of two convolutions; every second one halves the image, twice at most.

    `width` channels at first, doubled where the image is halved. The norms are group norms.
    """
    layers: list[nn.Module] = [AsImage()] if shape.kind == "signal" else []
    layers.append(conv(shape, channels(shape), width, 3))
    for i in range(depth):
        stride = 2 if i in (1, 3) else 1
        layers.append(PreNormBlock(shape, width, width * stride, stride, activation))
        width *= stride
    return nn.Sequential(*layers, group_norm(width), activation(), Head(width, shape.classes))


def convolved(shape: Shape, below: int, above: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without a bias, and its batch norm."""
    norm = nn.BatchNorm2d if shape.kind == "image" else nn.BatchNorm1d
    return conv(shape, below, above, size, stride, bias=False), norm(above)


class PostNormBlock(nn.Module):
    """`φ(skip(x) + norm conv φ norm conv x)`; the skip is a 1 × 1 convolution with a norm where the shape changes."""

    def __init__(self, shape: Shape, below: int, above: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolved(shape, below, above, 3, stride)
        self.conv2, self.norm2 = convolved(shape, above, above, 3)
        self.act1, self.act2 = activation(), activation()
        changes = stride > 1 or below != above
        self.skip = nn.Sequential(*convolved(shape, below, above, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(self.skip(x) + branch)


@network()
def resnet18(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) as it is used on CIFAR-10: a 3 × 3 stem, no pooling before the head, batch norm.

    A stem, four stages of two residual blocks, a linear head: 11.17 million parameters with `width` 64. `depth` is not
    read: there are always eight blocks. `sites=4` cuts at the stages, `sites=8` at the blocks.
    """
    layers = [AsImage(), *convolved(shape, channels(shape), width, 3), activation()]
    for stage, block in itertools.product(range(STAGES), range(BLOCKS)):
        stride = 2 if stage > 0 and block == 0 else 1
        layers.append(PostNormBlock(shape, width, width * stride, stride, activation))
        width *= stride
    return nn.Sequential(*layers, Head(width, shape.classes))


class Patches(nn.Module):
    """Cut a sample into patches and embed each: (batch, tokens, width), with a learned position.

    The side of a patch is the largest of 4, 2 and 1 that divides the sample's side into at least four, or else 1.
    """

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        whole = shape.size[-1]
        side = next(size for size in (4, 2, 1) if (whole % size == 0 and whole // size >= 4) or size == 1)
        self.as_image = AsImage()
        self.embed = conv(shape, channels(shape), width, side, side, padding=0)
        self.tokens = (whole // side) ** (2 if shape.kind == "image" else 1)
        self.position = nn.Parameter(0.02 * torch.randn(self.tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.as_image(x)).flatten(2).mT + self.position


class Characters(nn.Module):
    """Embed each character: (batch, characters, width), with a learned position."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.classes, width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.size[0], width))

    def forward(self, characters: Tensor) -> Tensor:
        embedded: Tensor = self.embed(characters)
        return embedded + self.position[: characters.shape[1]]


class Tokens(nn.Module):
    """Embedded tokens, blocks, a norm and a linear head: on each character of a text, else on the mean over tokens."""

    def __init__(self, embed: Patches | Characters, blocks: Iterable[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.reader = "characters" if isinstance(embed, Characters) else "patches"
        self.add_module(self.reader, embed)
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(getattr(self, self.reader)(x)))
        return self.head(x if self.reader == "characters" else x.mean(1))


class Perceptron(nn.Sequential):
    """Two layers, the inner one `factor` times as wide."""

    def __init__(self, width: int, factor: int, activation: Activation) -> None:
        super().__init__(nn.Linear(width, factor * width), activation(), nn.Linear(factor * width, width))


class AcrossTokens(Perceptron):
    """The same on the other axis: (batch, tokens, features), each feature by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Attention(nn.Module):
    """Multi-head self-attention, causal or not."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.heads = next(heads for heads in (4, 2, 1) if (width % heads == 0 and width // heads >= HEAD) or heads == 1)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.project_in(x).split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (batch, heads, tokens, features)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def attention_block(width: int, activation: Activation, causal: bool) -> Residual:
    """`x + attention(norm x)`, then `x + perceptron(norm x)`."""
    return Residual(
        {"norm1": nn.LayerNorm(width), "attention": Attention(width, causal)},
        {"norm2": nn.LayerNorm(width), "perceptron": Perceptron(width, 4, activation)},
    )


@network()
def mixer(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """An MLP-mixer: `depth` blocks on patches of `width` features."""
    patches = Patches(shape, width)
    blocks = (
        Residual(
            {"norm1": nn.LayerNorm(width), "tokens": AcrossTokens(patches.tokens, 2, activation)},
            {"norm2": nn.LayerNorm(width), "features": Perceptron(width, 2, activation)},
        )
        for _ in range(depth)
    )
    return Tokens(patches, blocks, width, shape.classes)


@network()
def vit(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """A small vision transformer: `depth` pre-norm blocks of `width` features."""
    blocks = (attention_block(width, activation, causal=False) for _ in range(depth))
    return Tokens(Patches(shape, width), blocks, width, shape.classes)


@network(reads="text")
def charformer(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Tokens:
    """A causal character transformer: `depth` blocks of `width` features; (batch, characters, alphabet)."""
    blocks, characters = (
        (attention_block(width, activation, causal=True) for _ in range(depth)),
        Characters(shape, width),
    )
    model = Tokens(characters, blocks, width, shape.classes)
    nn.init.normal_(characters.embed.weight, std=0.1)
    return model


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


@network(reads="both")
def gru(shape: Shape, width: int, depth: int, bias: bool, activation: Activation) -> Recurrent:
    """`depth` recurrent layers of `width` units."""
    return Recurrent(shape, width, depth)
