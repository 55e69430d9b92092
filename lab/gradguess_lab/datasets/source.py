"""Where the arrays of a data set come from: a generator or a file of an installed package, never a download.

Images are kept as bytes and text as character numbers: `gradguess_lab.data` turns them into model inputs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
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


def cache_directory() -> Path:
    """Where generated data is kept: `GRADGUESS_CACHE`, else `gradguess` in the user's cache directory."""
    if explicit := os.environ.get("GRADGUESS_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradguess"


def package_file(package: str, path: str) -> Path | None:
    """A file of an installed package, found without importing the package."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (candidate := Path(folder) / path).exists():
            return candidate
    return None


def named(*arrays: np.ndarray) -> Arrays:
    """The four arrays under their names."""
    return dict(zip(NAMES, arrays, strict=True))


def shuffled_split(x: np.ndarray, y: np.ndarray, test: int) -> Arrays:
    """Bytes in a fixed random order, the last `test` of them for testing."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype("uint8"), y[order].astype("uint8")
    return named(x[:-test], y[:-test], x[-test:], y[-test:])
