"""Recurrent layers and cells in plain operations against PyTorch's own on a CPU, which carry a tangent: in float64."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

import gradguess as gg
from gradguess.layers.table import TangentRules


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(x: Tensor) -> PackedSequence:
    """PyTorch's own packing has no tangent."""
    return PackedSequence(x.flatten(0, 1)[:9], torch.tensor([3, 2, 2, 1, 1]))


LAYERS = {
    "gru": (nn.GRU(5, 4), lambda layer, x: layer(x)),
    "gru, batch first, no bias": (nn.GRU(5, 4, batch_first=True, bias=False), lambda layer, x: layer(x)),
    "gru, two layers, two directions": (nn.GRU(5, 4, 2, bidirectional=True), lambda layer, x: layer(x)),
    "gru, dropout": (nn.GRU(5, 4, 3, dropout=0.5, batch_first=True), lambda layer, x: layer(x)),
    "gru, packed": (nn.GRU(5, 4, 2, bidirectional=True, dropout=0.3), lambda layer, x: layer(packed(x))),
    "gru, a first state": (nn.GRU(5, 4), lambda layer, x: layer(x, x[0, :, :4][None])),
    "lstm": (nn.LSTM(5, 4), lambda layer, x: layer(x)),
    "lstm, two layers, two directions": (nn.LSTM(5, 4, 2, bidirectional=True), lambda layer, x: layer(x)),
    "lstm, projection, no bias": (nn.LSTM(5, 4, 2, proj_size=3, bias=False), lambda layer, x: layer(x)),
    "lstm, dropout": (nn.LSTM(5, 4, 2, dropout=0.5), lambda layer, x: layer(x)),
    "lstm, packed": (nn.LSTM(5, 4), lambda layer, x: layer(packed(x))),
    "rnn": (nn.RNN(5, 4, 2, nonlinearity="relu"), lambda layer, x: layer(x)),
    "gru cell": (nn.GRUCell(5, 4), lambda layer, x: layer(x[0], layer(x[1]))),
    "gru cell, no bias": (nn.GRUCell(5, 4, bias=False), lambda layer, x: layer(x[0])),
    "gru cell, one sample": (nn.GRUCell(5, 4), lambda layer, x: layer(x[0, 0], x[0, 1, :4])),
    "lstm cell": (nn.LSTMCell(5, 4), lambda layer, x: layer(x[0], layer(x[1]))),
    "lstm cell, no bias": (nn.LSTMCell(5, 4, bias=False), lambda layer, x: layer(x[0])),
    "rnn cell": (nn.RNNCell(5, 4), lambda layer, x: layer(x[0], layer(x[1]))),
}


def dual(layer: nn.Module, run, x: Tensor, t: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """All outputs and their tangents. `weights` are directions of parameters."""
    torch.manual_seed(0)
    found = []
    with torch.no_grad(), fwAD.dual_level():
        own = {name: fwAD.make_dual(p.detach(), weights[name]) for name, p in layer.named_parameters() if weights}
        seen = fwAD.make_dual(x, t)
        outputs = torch.func.functional_call(_Whole(layer, run), {f"layer.{n}": p for n, p in own.items()}, seen)
        for out in tree_leaves(outputs):
            if isinstance(out, Tensor) and out.is_floating_point():
                found += fwAD.unpack_dual(out)
    return found


class _Whole(nn.Module):
    def __init__(self, layer: nn.Module, run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor):
        return self.run(self.layer, x)


@pytest.mark.parametrize("moving", [False, True], ids=["constant weights", "moving weights"])
@pytest.mark.parametrize("name", LAYERS)
def test_written_out(name, moving):
    layer, run = LAYERS[name]
    layer.double()
    x, t = noise(3, 6, 5), noise(3, 6, 5, seed=1)
    weights = {n: noise(*p.shape, seed=2) for n, p in layer.named_parameters()} if moving else {}
    expected = dual(layer, run, x, t, weights)
    with TangentRules():
        found = dual(layer, run, x, t, weights)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_cell_by_itself_in_float32():
    """PyTorch's plain operations for an LSTM are a fused kernel again on a CPU, unless the model holds an `nn.LSTM`."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.cell, self.head = nn.Linear(5, 4), nn.LSTMCell(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.stem(x))[0])

    args = nn.CrossEntropyLoss(reduction="none"), noise(3, 5).float(), torch.tensor([0, 1, 2])
    assert gg.estimate(Cells(), gg.WPerp(k=2), *args).jvp.isfinite().all()
