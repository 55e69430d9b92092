from __future__ import annotations

import dataclasses
import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradguess.errors import GradguessError
from gradguess_lab import data, datasets
from gradguess_lab.datasets import BATCHES, BINARY, NPM, Arrays, named

pytest.importorskip("mnist1d")
EACH = 6  # images in a batch of the stand-in for CIFAR-10


def small_arrays() -> Arrays:
    x = np.arange(12, dtype="float32").reshape(4, 3)
    y = np.array([0, 1, 2, 1])
    return named(x, y, x[:2], y[:2])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, beside which nothing is found."""
    monkeypatch.delenv("GRADGUESS_DATA", raising=False)
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path))
    return tmp_path


def test_mnist1d_is_the_papers_split_generated_cached_and_carried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    loaded = data.load("mnist1d")  # fills the session's cache
    assert loaded.x_train.shape == (4000, 40)
    assert loaded.x_test.shape == (1000, 40)
    assert loaded.x_train.dtype == torch.float32
    assert sorted(loaded.y_train.unique().tolist()) == list(range(10))
    monkeypatch.setitem(data.DATASETS, "mnist1d", dataclasses.replace(data.DATASETS["mnist1d"], make=None))
    assert torch.equal(data.load("mnist1d").x_train, loaded.x_train)
    monkeypatch.setenv("GRADGUESS_DATA", str(data.places()[-1]))
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path / "absent"))
    assert torch.equal(data.load("mnist1d").x_test, loaded.x_test)


def test_fingerprint_forgives_rounding_and_sees_reordering():
    arrays = small_arrays()
    reference = data.fingerprint(arrays)
    data._verified(arrays | {"x_train": arrays["x_train"] + 1e-6}, reference, "here")
    with pytest.raises(GradguessError, match="does not hold the data that was tested"):
        data._verified(arrays | {"x_train": arrays["x_train"][::-1]}, reference, "here")


def test_a_damaged_cache_is_made_again(monkeypatch: pytest.MonkeyPatch, folder: Path):
    monkeypatch.setitem(data.DATASETS, "tiny", data.Source(small_arrays, classes=3))
    expected = data.load("tiny").x_train
    path = folder / "tiny.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(data.load("tiny").x_train, expected)


def test_a_damaged_carried_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GRADGUESS_DATA", str(tmp_path))
    (tmp_path / "mnist1d.npz").write_bytes(b"not a dataset")
    with pytest.raises(GradguessError, match="damaged"):
        data.load("mnist1d")
    np.savez(tmp_path / "mnist1d.npz", **small_arrays())
    with pytest.raises(GradguessError, match="does not hold the data that was tested"):
        data.load("mnist1d")


def test_idx_files_are_read_from_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    images, labels = np.arange(24, dtype="uint8").reshape(2, 3, 4), np.array([1, 0], dtype="uint8")
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    monkeypatch.setenv("GRADGUESS_DATA", str(tmp_path))
    made = datasets.fashion_mnist()
    np.testing.assert_array_equal(made["x_test"], images)
    np.testing.assert_array_equal(made["y_train"], labels)


def encoded(pixels: np.ndarray) -> bytes:
    """A PNG file of (height, width, 3) bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """A few images in place of the 60000 of CIFAR-10."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (6 * EACH, 3, 32, 32), "uint8")
    y = draw.integers(0, 10, 6 * EACH, "uint8")
    return named(x[: 5 * EACH], y[: 5 * EACH], x[5 * EACH :], y[5 * EACH :])


@pytest.fixture(scope="module")
def files(arrays: Arrays) -> dict[str, dict[str, bytes]]:
    """The files of both sources of CIFAR-10 with these images."""
    x = np.concatenate([arrays["x_train"], arrays["x_test"]])
    y = np.concatenate([arrays["y_train"], arrays["y_test"]])
    npm, binary = {}, {}
    for i, name in enumerate(BATCHES):
        part = slice(i * EACH, (i + 1) * EACH)
        npm[f"{name}.png"] = encoded(x[part].reshape(EACH, 3, 1024).transpose(0, 2, 1))
        pairs = zip(x[part], y[part], strict=True)
        binary[f"{name}.bin"] = b"".join(bytes([label]) + image.tobytes() for image, label in pairs)
    npm["train_lables.json"] = json.dumps(arrays["y_train"].tolist()).encode()
    npm["test_lables.json"] = json.dumps(arrays["y_test"].tolist()).encode()
    return {NPM: npm, BINARY: binary}


def put(place: Path, files: dict[str, bytes]) -> None:
    """Write an archive."""
    with tarfile.open(place, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("source", [NPM, BINARY])
def test_both_sources_of_cifar10_give_the_same_arrays(arrays, files, folder: Path, source: str):
    put(folder / source, files[source])
    made = datasets.cifar10()
    assert data.digest(made) == data.digest(arrays)
    for key, expected in arrays.items():
        np.testing.assert_array_equal(made[key], expected)


def test_cifar10_is_recognised_cached_and_normalised(arrays, files, folder: Path, monkeypatch: pytest.MonkeyPatch):
    place, source = folder / BINARY, data.DATASETS["cifar10"]
    put(place, files[BINARY])
    with pytest.raises(GradguessError, match="does not hold the data that was tested"):
        data.load("cifar10")  # it is not CIFAR-10
    monkeypatch.setitem(data.DATASETS, "cifar10", dataclasses.replace(source, fingerprint=data.digest(arrays)))
    first = data.load("cifar10")
    place.unlink()
    again = data.load("cifar10")
    assert torch.equal(first.x_train, again.x_train)
    assert again.shape == data.Shape("image", (3, 32, 32), 10)
    mean, deviation = source.scale
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


@pytest.mark.parametrize(
    ("source", "change"),
    [
        (BINARY, {"data_batch_2.bin": b"12345"}),
        (NPM, {"test_lables.json": b"[1, 2"}),
        (NPM, {"data_batch_5.png": encoded(np.zeros((6, 1024, 3), "uint8"))[:-40]}),
        (BINARY, {}),
    ],
)
def test_damaged_files_of_cifar10_are_named(files, folder: Path, source: str, change: dict):
    changed = {name: content for name, content in (files[source] | change).items() if content is not None}
    put(folder / source, changed)
    if not change:  # the archive itself
        (folder / source).write_bytes((folder / source).read_bytes()[:5000])
    with pytest.raises(GradguessError, match=rf"{source} is damaged .*get it again"):
        datasets.cifar10()


def test_words_of_a_text_are_numbered_by_how_often_they_come():
    made = datasets.shakespeare(32, words=True)
    for split in ("train", "test"):
        x, y = made[f"x_{split}"], made[f"y_{split}"]
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
        assert x.shape[1] == 32
    counts = np.bincount(np.concatenate([made["x_train"].ravel(), made["x_test"].ravel()]))
    assert len(counts) == datasets.WORDS
    assert counts[1] > counts[2] > counts[100] > counts[8000] > 0
