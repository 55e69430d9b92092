"""Pre-norm transformers: on patches of an image, and on the characters of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess_lab.models.common import Patches, drawn, refuse_text
from gradguess_lab.models.mixer import Perceptron

if TYPE_CHECKING:
    from gradguess_lab.data import Shape

HEAD = 16  # least features of an attention head


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


class Block(nn.Module):
    """`x + attention(norm x)`, then `x + perceptron(norm x)`."""

    def __init__(self, width: int, activation: str, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, causal)
        self.norm2, self.perceptron = nn.LayerNorm(width), Perceptron(width, 4, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, blocks, mean over tokens."""

    def __init__(self, shape: Shape, width: int, depth: int, activation: str) -> None:
        super().__init__()
        self.patches = Patches(shape, width)
        self.blocks = nn.Sequential(*(Block(width, activation, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x))).mean(1))


class Characters(nn.Module):
    """Embed each character: (batch, characters, width), with a learned position."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.classes, width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.size[0], width))

    def forward(self, characters: Tensor) -> Tensor:
        embedded: Tensor = self.embed(characters)
        return embedded + self.position[: characters.shape[1]]


class CharacterTransformer(nn.Module):
    """A causal language model: one prediction per character, (batch, characters, alphabet)."""

    def __init__(self, shape: Shape, width: int, depth: int, activation: str) -> None:
        super().__init__()
        self.characters = Characters(shape, width)
        self.blocks = nn.Sequential(*(Block(width, activation, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)
        nn.init.normal_(self.characters.embed.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(characters))))


def vit(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> VisionTransformer:
    """A small vision transformer: `depth` blocks of `width` features."""
    refuse_text(shape, "vit")
    return drawn(lambda: VisionTransformer(shape, width, depth, activation), generator)


def charformer(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> CharacterTransformer:
    """A causal character transformer: `depth` blocks of `width` features."""
    if shape.kind != "text":
        raise InputError("The model 'charformer' reads text: use --data shakespeare, or another model.")
    return drawn(lambda: CharacterTransformer(shape, width, depth, activation), generator)
