"""Every module of PyTorch's own list, `module_db`, between two linear layers, on every sample that has a batch.

By default some modules on one sample each. `make test-slow` runs all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import gradguess as gg
from models import Case
from module_samples import cases, module_infos
from outside_checks import CHECKS

SOME = (
    "AdaptiveAvgPool2d", "AvgPool1d", "BatchNorm1d", "BatchNorm2d", "Bilinear", "CTCLoss", "CircularPad1d", "Conv1d",
    "Conv2d", "ConvTranspose2d", "CrossEntropyLoss", "ELU", "Embedding", "FractionalMaxPool2d", "GELU", "GLU", "GRU",
    "GRUCell", "GroupNorm", "InstanceNorm2d", "LPPool2d", "LSTM", "LSTMCell", "LayerNorm", "LazyConv2d", "Linear",
    "LocalResponseNorm", "LogSoftmax", "MaxPool2d", "MultiheadAttention", "PReLU", "RMSNorm", "RNN", "ReLU",
    "ReflectionPad2d", "Softplus", "TransformerDecoderLayer", "TransformerEncoderLayer",
)  # fmt: skip
NO_SAMPLE = """
    AdaptiveLogSoftmaxWithLoss AlphaDropout ChannelShuffle CosineSimilarity CrossMapLRN2d Dropout Dropout1d Dropout2d
    Dropout3d EmbeddingBag FeatureAlphaDropout Flatten Fold Hardsigmoid Identity LazyBatchNorm1d LazyBatchNorm2d
    LazyBatchNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear MaxUnpool1d MaxUnpool2d
    MaxUnpool3d NLLLoss2d PairwiseDistance PixelShuffle PixelUnshuffle RReLU SyncBatchNorm TransformerDecoder
    TripletMarginLoss TripletMarginWithDistanceLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d
"""
LEFT_OUT = {  # modules of torch.nn that are not run here, and why
    **dict.fromkeys(("Container", "Module", "RNNBase", "RNNCellBase"), "a base class"),
    **dict.fromkeys(("ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"), "it holds others"),
    **dict.fromkeys(NO_SAMPLE.split(), "the list has no sample of it"),
}
CLASSES = {name: getattr(nn, name) for name in nn.modules.__all__ if isinstance(getattr(nn, name), type)}
NAMES = [name for name, kind in CLASSES.items() if issubclass(kind, nn.Module) and name not in LEFT_OUT]
pytestmark = [
    pytest.mark.filterwarnings("ignore:linear_cross_entropy"),  # PyTorch's, where its chunks do not apply
    pytest.mark.filterwarnings("ignore:Samples mix"),  # the derivatives are right all the same
]


def found(name: str) -> list[tuple[str, Case]]:
    if name not in module_infos():
        pytest.skip("the list of this PyTorch has no such module")
    listed = cases(name)
    assert listed, "no sample has a batch: leave the module out, with the reason"
    return listed


def broad(name: str) -> Case:
    """The first sample that has several numbers, if there is one."""
    listed = [case for _, case in found(name)]
    return next((case for case in listed if case.model.head.in_features > 1), listed[0])


def test_every_module_of_the_list_is_run_or_left_out():
    assert LEFT_OUT.keys() <= CLASSES.keys()
    assert set(SOME) <= set(NAMES)
    assert module_infos().keys() <= set(NAMES)


@pytest.mark.sweep
def test_the_page_says_what_is_refused():
    page = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
    refused = []
    for name in filter(module_infos().__contains__, NAMES):
        case = broad(name)
        try:
            gg.estimate(case.model, gg.WTranspose(), *case.args, sites="leaf")
        except gg.ForwardModeError as error:
            refused += re.findall(r"layer \((\w+)\) has no forward-mode formula.*Replace it by", str(error))
    assert f"| {'; '.join(refused)}; an `autograd" in page


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SOME)
def test_one_sample(name: str, check: str):
    CHECKS[check](broad(name))


@pytest.mark.sweep
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample(name: str, check: str):
    for label, case in found(name):
        try:
            CHECKS[check](case)
        except Exception as error:
            error.add_note(f"on sample {label}")
            raise
