from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gradguess.errors import GradguessError
from gradguess.experiments import data

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


def test_generating_twice_gives_the_same_and_leaves_the_global_generators_alone():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    first = data.make_mnist1d()
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())
    second = data.make_mnist1d()
    for name in data.NAMES:
        np.testing.assert_array_equal(first[name], second[name])


def test_the_cached_file_equals_the_generated_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    data.load("mnist1d")  # fills the session's cache
    monkeypatch.setattr(data, "make_mnist1d", None)
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


def test_pickles_are_never_loaded(tmp_path: Path):
    np.savez(tmp_path / "evil.npz", x_train=np.array([{}], dtype=object))
    with pytest.raises(GradguessError, match="allow_pickle"):
        data.load_npz(tmp_path / "evil.npz")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "mnist1d.data", None)
    with pytest.raises(GradguessError, match=r"pip install 'gradguess\[data\]'"):
        data.make_mnist1d()


def test_an_unknown_dataset_suggests_the_nearest():
    with pytest.raises(GradguessError, match="Did you mean 'mnist1d'"):
        data.load("mnist-1d")
