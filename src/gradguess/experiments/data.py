"""Datasets as tensors: generated once, cached as `.npz`, checked on every load.

A dataset is looked for in the directory `GRADGUESS_DATA` (a file carried to a machine without the generating
package), then in the cache (`GRADGUESS_CACHE`, else the XDG cache directory), and made otherwise.
"""

from __future__ import annotations

import contextlib
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradguess.errors import GradguessError
from gradguess.experiments.files import write_atomic
from gradguess.experiments.names import lookup

Arrays = dict[str, np.ndarray]
NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Dataset:
    """Two splits, whole in memory; `x` is floating point, `y` holds class numbers."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @property
    def inputs(self) -> int:
        """Numbers per sample."""
        return self.x_train[0].numel()

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Dataset:
        """The same data on `device`, inputs in `dtype`: small data is moved once, not batch by batch."""
        return Dataset(
            self.x_train.to(device, dtype),
            self.y_train.to(device),
            self.x_test.to(device, dtype),
            self.y_test.to(device),
            self.classes,
        )


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from, and the numbers by which it is recognised (see `fingerprint`)."""

    make: Callable[[], Arrays]
    classes: int
    fingerprint: tuple[float, ...] | None = None


@contextlib.contextmanager
def global_rng_untouched() -> Iterator[None]:
    """Undo what the block does to the global `random` and `numpy.random` generators."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that we protect)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def make_mnist1d() -> Arrays:
    """MNIST-1D by its authors' generator, default arguments: 4000 + 1000 signals of 40 numbers."""
    try:
        from mnist1d.data import make_dataset
    except ModuleNotFoundError as error:
        raise GradguessError(
            f"MNIST-1D needs the package {error.name!r}: pip install 'gradguess[data]', or put mnist1d.npz "
            "in the directory named by GRADGUESS_DATA."
        ) from error
    with global_rng_untouched():  # the generator seeds both
        made = make_dataset()
    renamed = {"x_train": made["x"], "y_train": made["y"], "x_test": made["x_test"], "y_test": made["y_test"]}
    return {name: array.astype("float32" if name[0] == "x" else "int64") for name, array in renamed.items()}


def fingerprint(arrays: Arrays) -> tuple[float, ...]:
    """Per array its mean, mean square and a position-dependent projection.

    Compared with a tolerance, because other versions of the numerical libraries round differently; the
    projection still sees any reordering.
    """
    numbers: list[float] = []
    for name in NAMES:
        flat = arrays[name].astype("float64").ravel()
        wave = np.cos(0.37 * np.arange(flat.size))
        numbers += [float(flat.mean()), float((flat**2).mean()), float((flat * wave).mean())]
    return tuple(numbers)


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in NAMES}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GradguessError(f"{path} is not a dataset of gradguess, or is damaged ({error}); delete it.") from error
    if any(len(arrays[f"x_{split}"]) != len(arrays[f"y_{split}"]) for split in ("train", "test")):
        raise GradguessError(f"{path}: inputs and targets differ in number; delete it.")
    return arrays


def _verify(arrays: Arrays, expected: tuple[float, ...] | None, where: str) -> None:
    found = fingerprint(arrays)
    if expected is not None and not np.allclose(found, expected, rtol=1e-4, atol=1e-5):
        worst = int(np.abs(np.subtract(found, expected)).argmax())
        raise GradguessError(
            f"{where} does not hold the data that was tested: {NAMES[worst // 3]} differs (expected "
            f"{expected[worst]:.6f}, found {found[worst]:.6f})."
        )


def _tensors(arrays: Arrays, classes: int) -> Dataset:
    x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[name]) for name in NAMES)
    return Dataset(x_train, y_train, x_test, y_test, classes)


def load_npz(path: str | Path, classes: int | None = None) -> Dataset:
    """A dataset from a file with the arrays `x_train`, `y_train`, `x_test`, `y_test`."""
    arrays = _read(Path(path))
    found = 1 + int(max(arrays["y_train"].max(), arrays["y_test"].max()))
    return _tensors(arrays, classes if classes is not None else found)


def save_npz(path: str | Path, arrays: Arrays) -> None:
    """Write what `load_npz` reads, in one step."""
    import io

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomic(Path(path), buffer.getvalue())


def cache_directory() -> Path:
    """Where generated data is kept: `GRADGUESS_CACHE`, else `gradguess` in the user's cache directory."""
    if explicit := os.environ.get("GRADGUESS_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradguess"


def _made_and_cached(source: Source, path: Path) -> Arrays:
    arrays = source.make()
    _verify(arrays, source.fingerprint, "the generator")
    with contextlib.suppress(OSError, GradguessError):  # a read-only cache costs seconds, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        save_npz(path, arrays)
    return arrays


def load(name: str) -> Dataset:
    """The dataset `name` of `DATASETS`, from the carried file, the cache or its generator."""
    source = lookup(DATASETS, name, "dataset")
    carried = os.environ.get("GRADGUESS_DATA")
    if carried and (path := Path(carried) / f"{name}.npz").is_file():
        arrays = _read(path)
        _verify(arrays, source.fingerprint, str(path))
        return _tensors(arrays, source.classes)
    path = cache_directory() / f"{name}.npz"
    try:
        arrays = _read(path)
        _verify(arrays, source.fingerprint, str(path))
    except GradguessError:  # absent or damaged: the cache is ours to make again
        arrays = _made_and_cached(source, path)
    return _tensors(arrays, source.classes)


MNIST1D_FINGERPRINT = (
    *(-0.00032367, 0.99530159, -0.00168027),  # x_train
    *(4.50450000, 28.53450000, 0.04912184),  # y_train
    *(0.00129469, 1.01879365, -0.00379256),  # x_test
    *(4.48200000, 28.36200000, -0.07078862),  # y_test
)

DATASETS: dict[str, Source] = {
    "mnist1d": Source(make_mnist1d, classes=10, fingerprint=MNIST1D_FINGERPRINT),
}

__all__ = ["DATASETS", "Dataset", "Source", "fingerprint", "load", "load_npz", "save_npz"]
