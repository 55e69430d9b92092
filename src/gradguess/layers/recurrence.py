"""GRU and LSTM, layers and cells, in plain operations: fused kernels, such as those of CUDA, carry no tangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch._decomp.decompositions import one_layer_lstm

from gradguess.layers.entry import Layer, is_constant, rewired

State = tuple[Tensor, Tensor]  # (h, c) of an LSTM cell
_aten = torch.ops.aten
_PLAIN = get_decompositions([_aten.gru.input, _aten.gru.data, _aten.lstm.input, _aten.lstm.data])
_PLAIN[_aten.lstm.input] = rewired(  # by itself it would take a fused kernel for inference
    _PLAIN[_aten.lstm.input], select_one_layer_lstm_function=lambda *args: one_layer_lstm
)


def layers(function: Any, *args: Any, **options: Any) -> tuple[Tensor, ...] | None:
    """`torch.gru` and `torch.lstm` by PyTorch's own decompositions, layer by layer, since these leave out dropout."""
    if options:
        return None
    packed = not isinstance(args[3], bool)  # (x, batch_sizes, state, …) instead of (x, state, …, batch_first)
    x, state, weights, biases, count, dropout, training, both = args[:1] + args[2:] if packed else args[:-1]
    several = not isinstance(state, Tensor)  # of an LSTM
    if is_constant(x, *(state if several else (state,)), *weights):
        return None
    plain = _PLAIN[getattr(getattr(_aten, function.__name__), "data" if packed else "input")]
    turned = not packed and args[-1]  # to time first, as PyTorch's own kernels turn it: they draw dropout in that order
    x = x.transpose(0, 1) if turned else x
    states, own, each = [], 2 if both else 1, len(weights) // count
    for i in range(count):
        below = tuple(s[i * own : (i + 1) * own] for s in (state if several else (state,)))
        last = (below if several else below[0], weights[i * each : (i + 1) * each], biases, 1, 0.0, training, both)
        x, *above = plain(x, args[1], *last) if packed else plain(x, *last, False)
        states.append(above)
        if dropout and training and i < count - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if turned else x, *(torch.cat(part) for part in zip(*states, strict=True))


def gru(x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None) -> Tensor:
    """The new state of a GRU cell."""
    gates, recurrent = F.linear(x, w_x, b_x).chunk(3, 1), F.linear(h, w_h, b_h).chunk(3, 1)
    reset, update = (torch.sigmoid(gates[i] + recurrent[i]) for i in (0, 1))
    new = torch.tanh(gates[2] + reset * recurrent[2])
    return new + update * (h - new)


def lstm(
    x: Tensor, state: State, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
) -> State:
    """The new state (h, c) of an LSTM cell."""
    h, c = state
    into, keep, new, show = (F.linear(x, w_x, b_x) + F.linear(h, w_h, b_h)).chunk(4, 1)
    c = torch.sigmoid(keep) * c + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(c), c


def _cell(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a cell that is written out in `plain`."""

    def cell(function: Any, x: Tensor, state: Any, w_x: Tensor, w_h: Tensor, *biases: Tensor | None) -> Any:
        states = (state,) if isinstance(state, Tensor) else state
        return None if is_constant(x, *states, w_x, w_h, *biases) else plain(x, state, w_x, w_h, *biases)

    return cell


LAYERS = (
    Layer(functions=(torch.gru, torch.lstm), written_out=layers),
    Layer(functions=(torch.gru_cell,), written_out=_cell(gru)),
    Layer(functions=(torch.lstm_cell,), written_out=_cell(lstm)),
)
