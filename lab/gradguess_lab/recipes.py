"""Training recipes for CIFAR-10, with backpropagation: one of each is a run to compare other methods with.

>>> import dataclasses
>>> dataclasses.replace(RECIPES["resnet18-cifar10"], method="feedback-direct", sites="4", device="cuda").epochs
30
"""

from __future__ import annotations

import dataclasses

from gradguess_lab.config import TrainConfig

_common = TrainConfig(
    data="cifar10",
    method="backprop",
    batch=512,
    warmup=0.2,
    smoothing=0.1,
    augment=True,
    autocast=True,
    matmul="high",
    eval_every=5,
)

RECIPES: dict[str, TrainConfig] = {
    "resnet18-cifar10": dataclasses.replace(
        _common,
        model="resnet18",
        width=64,
        epochs=30,
        optimiser="sgd",
        lr=0.4,
        weight_decay=5e-4,
        schedule="linear",
        channels_last=True,
    ),
    # eight blocks, as in ResNet-18, and about as many multiplications
    "vit-cifar10": dataclasses.replace(
        _common,
        model="vit",
        width=288,
        depth=8,
        activation="gelu",
        epochs=60,
        lr=1e-3,
        weight_decay=0.05,
        schedule="cosine",
    ),
}
