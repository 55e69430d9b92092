"""MNIST-1D by its authors' generator with its default arguments: 4000 + 1000 signals of 40 numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from gradguess_lab.datasets.source import Arrays, Source


@contextlib.contextmanager
def global_generators_untouched() -> Iterator[None]:
    """Undo what the block does to the global `random` and `numpy.random` generators."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that we protect)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def make() -> Arrays:
    from mnist1d.data import make_dataset  # help needs none

    with global_generators_untouched():  # the generator seeds both
        made = make_dataset()
    renamed = {"x_train": made["x"], "y_train": made["y"], "x_test": made["x_test"], "y_test": made["y_test"]}
    return {name: array.astype("float32" if name[0] == "x" else "int64") for name, array in renamed.items()}


SOURCE = Source(
    make,
    classes=10,
    fingerprint=(
        *(-0.00032367, 0.99530159, -0.00168027, 4.50450000, 28.53450000, 0.04912184),
        *(0.00129469, 1.01879365, -0.00379256, 4.48200000, 28.36200000, -0.07078862),
    ),
)
