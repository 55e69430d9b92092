"""The registry of tasks: networks on data, which the comparison, the study of real networks and the benchmarks share.

To add a task, add a line to `TASKS`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.datasets import DATASETS
from gradguess_lab.methods import entry_of, settings_of

RATES = (3e-4, 1e-3, 3e-3)  # learning rates of AdamW


@dataclass(frozen=True)
class Task:
    """A network on data.

    Attributes:
        title: in tables and figures.
        config: how backpropagation would train it.
        used: the experiments that it is part of: `compare`, `real`; all tasks can be timed. `large-cuda` and
            `large-cpu` are of sizes at which products count, and not how fast they are started.
        pieces: into how many the network is cut in a comparison, for methods that work in pieces.
        rates: learning rates that every method is tried with.
    """

    title: str
    config: TrainConfig
    used: str = ""
    pieces: int = 4
    rates: tuple[float, ...] = RATES

    @property
    def quantity(self) -> str:
        """What the task is judged by; of bits fewer are better."""
        return "bits" if DATASETS[self.config.data].kind == "text" else "accuracy"

    def settings(self, method: str) -> dict[str, Any]:
        """The fields of `TrainConfig` that a method or a variant has on this task in a comparison."""
        return {"sites": str(self.pieces) if entry_of(method).pieces else "auto", **settings_of(method)}


_COMMON = TrainConfig(epochs=20, batch=128, schedule="cosine", rate=0.1, eval_every=1)


def _task(title: str, used: str, pieces: int = 4, rates: tuple[float, ...] = RATES, **settings: Any) -> Task:
    return Task(title, dataclasses.replace(_COMMON, **settings), used, pieces, rates)


_CIFAR10: dict[str, Any] = {
    "data": "cifar10", "batch": 512, "warmup": 0.2, "smoothing": 0.1, "augment": True, "autocast": True,
    "matmul": "high", "method": "backprop",
}  # fmt: skip
TASKS: dict[str, Task] = {
    "mlp-mnist1d": _task("MLP on MNIST-1D", "compare", data="mnist1d", model="mlp", width=256, bias=True, epochs=100),
    "mlp-mnist": _task("MLP on MNIST", "real", data="mnist", model="mlp", width=256, bias=True),
    "cnn-mnist": _task("CNN on MNIST", "real", data="mnist", model="cnn", width=32),
    "cnn-fashion-mnist": _task(
        "CNN on Fashion-MNIST", "compare real", data="fashion-mnist", model="cnn", width=32
    ),
    "resnet-fashion-mnist": _task(
        "Residual CNN on Fashion-MNIST", "real", data="fashion-mnist", model="resnet", width=32, depth=4
    ),
    "residual-mnist1d": _task("Residual MLP on MNIST-1D", "real", model="residual", width=128, depth=12, epochs=40),
    "residual24-mnist1d": _task(
        "Deep residual MLP on MNIST-1D", "compare", pieces=6, model="residual", width=128, depth=24, epochs=100
    ),
    "mixer-mnist": _task("Mixer on MNIST", "real", data="mnist", model="mixer", width=64, depth=4, activation="gelu"),
    "vit-mnist": _task(
        "Vision transformer on MNIST", "real", data="mnist", model="vit", width=64, depth=4, activation="gelu"
    ),
    "charformer-shakespeare": _task(
        "Character transformer on Shakespeare", "compare real",
        data="shakespeare", model="charformer", width=128, depth=4, activation="gelu", batch=64,
    ),
    "resnet18-cifar10": _task(
        "ResNet-18 on CIFAR-10", "compare large-cuda", rates=(0.1, 0.2, 0.4), **_CIFAR10,
        model="resnet18", width=64, epochs=30, optimiser="sgd", lr=0.4, weight_decay=5e-4, schedule="linear",
        channels_last=True,
    ),
    # eight blocks, as in ResNet-18, and about as many multiplications
    "vit-cifar10": _task(
        "Vision transformer on CIFAR-10", "compare", **_CIFAR10,
        model="vit", width=288, depth=8, activation="gelu", epochs=60, lr=1e-3, weight_decay=0.05,
    ),
    "resnet-cifar10": _task(
        "Residual CNN on CIFAR-10", "large-cuda", data="cifar10", model="resnet", width=64, depth=4, batch=256
    ),
    **{
        f"{name.lower()}-{depth}x{width}": _task(
            f"{name}, {depth} blocks of {width}", f"large-{device}", model=name.lower(), depth=depth, width=width,
            data=data, batch=batch, activation="gelu", autocast=half,
        )
        for name, depth, width, data, batch, half, device in (
            ("GPT", 4, 256, "shakespeare-256", 8, False, "cpu"),
            ("GPT", 6, 384, "shakespeare-256", 32, False, "cuda"),
            ("GPT", 12, 768, "words-1024", 8, True, "cuda"),
            ("Llama", 8, 512, "words-512", 16, True, "cuda"),
        )
    },
    **{
        f"paper-{width}": Task(f"The paper's network, width {width}", TrainConfig(width=width), used)
        for width, used in ((64, ""), (128, ""), (512, ""), (1024, ""), (2048, "large-cpu"))
    },
}  # fmt: skip


def used_in(experiment: str) -> list[str]:
    """The tasks of an experiment.

    >>> used_in("compare")[:2]
    ['mlp-mnist1d', 'cnn-fashion-mnist']
    """
    return [name for name, task in TASKS.items() if experiment in task.used.split()]
