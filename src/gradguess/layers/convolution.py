"""Convolutions and transposed convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.layers.entry import Layer, apply_linear

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def gradient(layer: Convolution, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    spatial = len(layer.kernel_size)
    x, g = x.reshape(-1, *x.shape[-spatial - 1 :]), g.reshape(-1, *g.shape[-spatial - 1 :])
    wants_bias = layer.bias is not None and layer.bias.requires_grad
    _, weight, bias = torch.ops.aten.convolution_backward(
        g,
        x,
        layer.weight.to(g.dtype),
        [layer.out_channels] if wants_bias else None,
        list(layer.stride),
        [int(p) for p in layer.padding],
        list(layer.dilation),
        layer.transposed,
        list(layer.output_padding),
        layer.groups,
        [False, layer.weight.requires_grad, wants_bias],
    )
    return {name: grad for name, grad in (("weight", weight), ("bias", bias)) if grad is not None}


def pads_with_zeros(layer: Convolution) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


LAYER = Layer(
    modules=(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    functions=(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    gradient=gradient,
    holds_for=pads_with_zeros,
    tangent=apply_linear,
    always=True,
    channels_first=True,
)
