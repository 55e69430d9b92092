"""Data sets as tensors: made once, cached as `.npz`, checked on every load.

A data set is looked for in the directory `GRADGUESS_DATA` (a file carried to a machine without the package that makes
it), then in the cache (`GRADGUESS_CACHE`, else the XDG cache directory). Where neither has it, it is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradguess.errors import GradguessError, check_choice
from gradguess_lab.datasets import DATASETS, NAMES, Arrays, Kind, Source, places
from gradguess_lab.files import write_atomic


@dataclass(frozen=True)
class Shape:
    """What a network must fit: one sample, and what is predicted from it.

    A signal is (length,), an image (channels, height, width), a text (characters,) with one prediction for each.
    """

    kind: Kind
    size: tuple[int, ...]
    classes: int  # or characters

    @property
    def inputs(self) -> int:
        """Numbers per sample."""
        return prod(self.size)


@dataclass(frozen=True)
class Dataset:
    """Two splits, whole in memory; `y` holds class numbers; `x` is floating point, or characters' numbers."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    kind: Kind = "signal"

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, tuple(self.x_train.shape[1:]), self.classes)

    def first(self, samples: int) -> Dataset:
        """The same with the first `samples` training samples; with all of them for 0, or where there are fewer."""
        return replace(self, x_train=self.x_train[:samples], y_train=self.y_train[:samples]) if samples else self

    def held_out(self, part: float) -> Dataset:
        """The same with the last part of the training samples in place of the test set; unchanged for 0."""
        cut = len(self.x_train) - max(1, round(part * len(self.x_train)))
        if not part or not cut:
            return self
        x, y = self.x_train, self.y_train
        return replace(self, x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Dataset:
        """The same data on `device`, inputs in `dtype`: small data is moved once, not batch by batch."""
        x_dtype = dtype if self.x_train.is_floating_point() else self.x_train.dtype
        return replace(
            self,
            x_train=self.x_train.to(device, x_dtype),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device, x_dtype),
            y_test=self.y_test.to(device),
        )


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


def digest(arrays: Arrays) -> str:
    """SHA-256 of shapes, types and bytes: for data that is the same to the last bit wherever it comes from."""
    found = hashlib.sha256()
    for name in NAMES:
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape};".encode())
        found.update(array.data)
    return found.hexdigest()


Fingerprint = tuple[float, ...] | str | None


def _verified(arrays: Arrays, expected: Fingerprint, where: str) -> Arrays:
    if isinstance(expected, str):
        same = digest(arrays) == expected
    else:
        same = expected is None or np.allclose(fingerprint(arrays), expected, rtol=1e-4, atol=1e-5)
    if not same:
        raise GradguessError(
            f"{where} does not hold the data that was tested. Delete it and get the data again, or install the pinned "
            "versions."
        )
    return arrays


def _read(path: Path, expected: Fingerprint) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in NAMES}
    except Exception as error:
        raise GradguessError(f"{path} is not a data set of gradguess, or is damaged ({error}); delete it.") from error
    return _verified(arrays, expected, str(path))


def _inputs(x: np.ndarray, source: Source) -> Tensor:
    """Model inputs: images as (channels, height, width), normalised; characters as whole numbers."""
    if source.kind == "text":
        return torch.from_numpy(x.astype("int64"))
    if source.kind == "signal":
        return torch.from_numpy(x)
    mean, deviation = (torch.tensor(level).view(-1, 1, 1) for level in source.scale)  # (channels, 1, 1)
    images = torch.from_numpy(x)  # (images, height, width), with channels before the height if they have colours
    return ((images.unsqueeze(1) if images.dim() == 3 else images) / 255).sub_(mean).div_(deviation)


def _arrays(name: str, source: Source) -> Arrays:
    """The arrays of a data set from the carried file, the cache or its generator."""
    *carried, cache = (folder / f"{name}.npz" for folder in places())
    for path in carried:
        if path.is_file():
            return _read(path, source.fingerprint)
    with contextlib.suppress(GradguessError):  # absent or damaged: the cache is ours to make again
        return _read(cache, source.fingerprint)
    arrays = _verified(source.make(), source.fingerprint, "the generator")
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    with contextlib.suppress(OSError, GradguessError):  # a read-only cache costs seconds, not the run
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache, packed.getvalue())
    return arrays


def load(name: str) -> Dataset:
    """The data set `name` of `DATASETS` as tensors."""
    source = DATASETS[check_choice("data set", name, DATASETS)]
    arrays = _arrays(name, source)
    x_train, x_test = (_inputs(arrays[name], source) for name in ("x_train", "x_test"))
    y_train, y_test = (torch.from_numpy(arrays[name].astype("int64")) for name in ("y_train", "y_test"))
    return Dataset(x_train, y_train, x_test, y_test, source.classes, source.kind)
