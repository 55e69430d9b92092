"""Every layer of the coverage table: a stem below it, so that a tangent must cross it, and a head above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from gaps import NoJvp
from models import BATCH, CLASSES, INPUTS, BareParameters, Calls, Case, cross_entropy, frozen, per_sequence, tied

TOKENS, WIDTH = 4, 6
LossFn = Callable[[Any, Any], Tensor]


class Between(nn.Module):
    """stem -> layer -> flatten -> head. Of several outputs of the layer, the first."""

    def __init__(
        self, stem: nn.Module, layer: nn.Module, shape: tuple[int, ...], adapt: Callable | None = None
    ) -> None:
        super().__init__()
        self.stem, self.layer = stem, layer
        self.adapt = adapt or (lambda layer, x: layer(x))
        self.head = nn.Identity()
        with torch.no_grad():
            size = self._features(torch.randn(2, *shape)).shape[1]
        self.head = nn.Linear(size, CLASSES)

    def _features(self, x: Tensor) -> Tensor:
        out = self.adapt(self.layer, self.stem(x))
        return (out[0] if isinstance(out, tuple) else out).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x))


def _classes() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


def _case(model: nn.Module, inputs: Any, targets: Any = None, loss_fn: LossFn = cross_entropy) -> Case:
    return Case(model, inputs, _classes() if targets is None else targets, loss_fn)


def vector(layer: nn.Module) -> Case:
    return _case(Between(nn.Linear(INPUTS, WIDTH), layer, (INPUTS,)), torch.randn(BATCH, INPUTS))


def sequence(layer: nn.Module, adapt: Callable | None = None) -> Case:
    """(batch, tokens, features)."""
    model = Between(nn.Linear(INPUTS, WIDTH), layer, (TOKENS, INPUTS), adapt)
    return _case(model, torch.randn(BATCH, TOKENS, INPUTS))


def signal(layer: nn.Module) -> Case:
    """(batch, channels, length)."""
    return _case(Between(nn.Conv1d(2, 4, 1), layer, (2, 6)), torch.randn(BATCH, 2, 6))


def image(layer: nn.Module) -> Case:
    """(batch, channels, height, width)."""
    return _case(Between(nn.Conv2d(2, 4, 1), layer, (2, 4, 4)), torch.randn(BATCH, 2, 4, 4))


def output(loss_fn: LossFn, targets: Callable[[], Tensor]) -> Case:
    """A loss above two linear layers."""
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    return _case(model, torch.randn(BATCH, INPUTS), targets(), loss_fn)


def tokens(layer: nn.Module) -> Case:
    """Token numbers; one of them is 0, the padding."""
    inputs = torch.randint(9, (BATCH, TOKENS))
    inputs[0, 0] = 0
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(TOKENS * WIDTH, CLASSES))
    return _case(model, inputs)


def attend(layer: nn.Module, x: Tensor) -> Any:
    return layer(x, x, x)


def attend_without_weights(layer: nn.Module, x: Tensor) -> Any:
    return layer(x, x, x, need_weights=False)


class CellLoop(nn.Module):
    """A recurrent cell, called once per time step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class LoRA(nn.Module):
    """A frozen linear layer and a trained one of rank 2 beside it."""

    def __init__(self, size: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class WithJvp(torch.autograd.Function):
    """The same with a forward-mode formula beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].cos()


def ctc() -> Case:
    lengths = torch.full((BATCH,), 3), torch.full((BATCH,), 2)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.ctc_loss(outputs.transpose(0, 1).log_softmax(-1), targets, lengths[0], lengths[1], reduction="none")

    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    return _case(model, torch.randn(BATCH, 3, INPUTS), torch.randint(1, CLASSES, (BATCH, 2)), loss)


def _real() -> Tensor:
    return torch.randn(BATCH, CLASSES)


def _probabilities() -> Tensor:
    return torch.rand(BATCH, CLASSES).softmax(1)


def mean_of(loss: nn.Module) -> LossFn:
    return lambda outputs, targets: loss(outputs, targets).mean(1)


ACTIVATIONS = [
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.Mish,
    nn.Hardswish, nn.PReLU, nn.Softsign,
]  # fmt: skip
encoder_layer = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 8, "batch_first": True}


@dataclass
class Row:
    """A row of the table: how to build it, and what deserves a word."""

    make: Callable[[], Case]
    coupling: str = "sample"
    note: str = ""


LAYERS: dict[str, Row] = {
    "Linear": Row(lambda: vector(nn.Linear(WIDTH, 5))),
    **{kind.__name__: Row(lambda kind=kind: vector(kind())) for kind in ACTIVATIONS},
    "ReLU, in place": Row(lambda: vector(nn.ReLU(inplace=True))),
    "Conv1d": Row(lambda: signal(nn.Conv1d(4, 3, 3, padding=1))),
    "Conv2d, strided": Row(lambda: image(nn.Conv2d(4, 3, 3, stride=2, padding=1))),
    "Conv2d, grouped": Row(lambda: image(nn.Conv2d(4, 4, 3, groups=2))),
    "Conv2d, circular padding": Row(lambda: image(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"))),
    "ConvTranspose2d": Row(lambda: image(nn.ConvTranspose2d(4, 2, 3, stride=2))),
    "BatchNorm1d, evaluation": Row(lambda: signal(nn.BatchNorm1d(4).eval())),
    "BatchNorm1d, training": Row(lambda: signal(nn.BatchNorm1d(4)), "batch", 'with `coupling="batch"`, see below'),
    "BatchNorm2d, training": Row(lambda: image(nn.BatchNorm2d(4)), "batch", 'with `coupling="batch"`, see below'),
    "LayerNorm": Row(lambda: sequence(nn.LayerNorm(WIDTH))),
    "RMSNorm": Row(lambda: sequence(nn.RMSNorm(WIDTH))),
    "GroupNorm": Row(lambda: image(nn.GroupNorm(2, 4))),
    "InstanceNorm2d": Row(lambda: image(nn.InstanceNorm2d(4, affine=True))),
    "Dropout": Row(lambda: vector(nn.Dropout(0.4)), note="every pass of a step sees one mask"),
    "MaxPool2d": Row(lambda: image(nn.MaxPool2d(2))),
    "AvgPool2d": Row(lambda: image(nn.AvgPool2d(2))),
    "AdaptiveAvgPool2d": Row(lambda: image(nn.AdaptiveAvgPool2d(2))),
    "Upsample, bilinear": Row(lambda: image(nn.Upsample(scale_factor=2, mode="bilinear"))),
    "Softmax": Row(lambda: vector(nn.Softmax(-1))),
    "MultiheadAttention": Row(lambda: sequence(nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend)),
    "MultiheadAttention, need_weights=False": Row(
        lambda: sequence(nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend_without_weights),
        note="without the matrix of all pairs",
    ),
    "MultiheadAttention, evaluation": Row(
        lambda: sequence(nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval(), attend_without_weights),
        note="without PyTorch's fast path",
    ),
    "scaled_dot_product_attention": Row(
        lambda: sequence(Calls(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))),
        note="without the matrix of all pairs",
    ),
    "TransformerEncoderLayer": Row(lambda: sequence(nn.TransformerEncoderLayer(**encoder_layer, dropout=0.1))),
    "TransformerEncoderLayer, evaluation": Row(lambda: sequence(nn.TransformerEncoderLayer(**encoder_layer).eval())),
    "TransformerDecoderLayer": Row(
        lambda: sequence(nn.TransformerDecoderLayer(**encoder_layer), lambda layer, x: layer(x, x))
    ),
    "RNN": Row(lambda: sequence(nn.RNN(WIDTH, 5, batch_first=True))),
    "GRU": Row(lambda: sequence(nn.GRU(WIDTH, 5, batch_first=True)), note="written out"),
    "LSTM": Row(lambda: sequence(nn.LSTM(WIDTH, 5, batch_first=True)), note="written out"),
    "LSTMCell": Row(lambda: sequence(CellLoop(nn.LSTMCell(WIDTH, 5))), note="written out"),
    "GRUCell": Row(lambda: sequence(CellLoop(nn.GRUCell(WIDTH, 5))), note="written out"),
    "Embedding": Row(lambda: tokens(nn.Embedding(9, WIDTH))),
    "Embedding, padding_idx": Row(lambda: tokens(nn.Embedding(9, WIDTH, padding_idx=0)), note="the pad row stays"),
    "Bilinear": Row(lambda: sequence(nn.Bilinear(WIDTH, WIDTH, 3), lambda layer, x: layer(x[:, 0], x[:, 1]))),
    "cross entropy": Row(lambda: output(cross_entropy, _classes)),
    "cross entropy, per token": Row(
        lambda: _case(tied(), torch.randint(9, (BATCH, 6)), torch.randint(9, (BATCH, 6)), per_sequence),
        note="tied weights",
    ),
    "MSE": Row(lambda: output(mean_of(nn.MSELoss(reduction="none")), _real)),
    "BCE with logits": Row(lambda: output(mean_of(nn.BCEWithLogitsLoss(reduction="none")), _probabilities)),
    "smooth L1": Row(lambda: output(mean_of(nn.SmoothL1Loss(reduction="none")), _real)),
    "Huber": Row(lambda: output(mean_of(nn.HuberLoss(reduction="none")), _real)),
    "KL divergence": Row(
        lambda: output(lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="none").sum(1), _probabilities)
    ),
    "CTC loss": Row(ctc),
    "frozen layers": Row(lambda: _case(frozen(), torch.randn(BATCH, INPUTS))),
    "LoRA adapter": Row(lambda: vector(LoRA(WIDTH))),
    "bare nn.Parameter": Row(lambda: _case(BareParameters(), torch.randn(BATCH, INPUTS))),
    "EmbeddingBag": Row(
        lambda: _case(
            nn.Sequential(nn.EmbeddingBag(9, WIDTH), nn.Linear(WIDTH, CLASSES)), torch.randint(9, (BATCH, TOKENS))
        )
    ),
    "weight_norm": Row(lambda: vector(weight_norm(nn.Linear(WIDTH, 5)))),
    "spectral_norm": Row(lambda: vector(spectral_norm(nn.Linear(WIDTH, 5)))),
    "autograd.Function without jvp": Row(lambda: vector(Calls(NoJvp.apply))),
    "autograd.Function with jvp": Row(lambda: vector(Calls(WithJvp.apply))),
}


def make(name: str) -> Case:
    """A row in float64, seeded; the global generator and default dtype are as before."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            return LAYERS[name].make()
        finally:
            torch.set_default_dtype(before)
