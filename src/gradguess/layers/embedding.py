"""Embeddings: each row of the table gets the sum of the cotangents at the places where it was read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradguess.layers.entry import Layer


def gradient(layer: nn.Embedding, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    if not layer.weight.requires_grad:
        return {}
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    grad = torch.ops.aten.embedding_dense_backward(g, x, layer.num_embeddings, padding, layer.scale_grad_by_freq)
    return {"weight": grad}


def reads_rows_unchanged(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.sparse


LAYER = Layer(modules=(nn.Embedding,), gradient=gradient, holds_for=reads_rows_unchanged)
