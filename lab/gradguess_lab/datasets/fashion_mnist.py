"""Fashion-MNIST, 60000 + 10000 images: the idx files of Debian's package, or the same files in `GRADGUESS_DATA`."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np

from gradguess.errors import GradguessError
from gradguess_lab.datasets.source import Arrays, Source, missing, named

FOLDER = Path("/usr/share/datasets/fashion-mnist")


def make() -> Arrays:
    places = [Path(os.environ["GRADGUESS_DATA"]) / "fashion-mnist"] if "GRADGUESS_DATA" in os.environ else []
    for folder in (*places, FOLDER):
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return named(
                *(
                    _read_idx(folder / f"{split}-{kind}-ubyte.gz")
                    for split in ("train", "t10k")
                    for kind in ("images-idx3", "labels-idx1")
                )
            )
    raise missing("fashion-mnist", f"the files in {FOLDER}", "apt install dataset-fashion-mnist")


def _read_idx(path: Path) -> np.ndarray:
    """Yann LeCun's idx format: two zero bytes, the type, the number of dimensions, then their sizes."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise GradguessError(f"{path} is not an idx file of bytes; restore it.")
    sizes = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, "uint8", offset=4 + 4 * data[3]).reshape(sizes).copy()


SOURCE = Source(
    make,
    classes=10,
    fingerprint=(
        *(72.94035, 13424.10826, -0.00333, 4.5, 28.5, 0.00787),
        *(73.14657, 13427.6229, 0.00688, 4.5, 28.5, -0.02582),
    ),
    kind="image",
    scale=(0.2860, 0.3530),
)
