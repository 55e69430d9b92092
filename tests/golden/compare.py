"""The golden record, and how numbers are held against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("golden.npz")
TOLERANCE = 1e-10
FLOOR = 1e-3  # a tensor that is much smaller than the largest of its case is held to this part of that one


def worst(expected: Mapping[str, float], found: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference, and its label.

    A norm is measured by itself, a projection by its tensor's norm, and both by no less than `FLOOR` of the largest
    norm of the case: what is zero but for rounding has no digits.
    """
    gone, new = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if gone or new:
        return float("inf"), f"labels differ: no longer there {gone}, new {new}"
    largest = max((abs(value) for label, value in expected.items() if label.endswith("norm")), default=0.0)
    worst_of, at = 0.0, ""
    for label, value in expected.items():
        own = expected.get(label.removesuffix("projection") + "norm", value)
        scale = max(abs(own), abs(value), FLOOR * largest, 1e-300)
        difference = abs(found[label] - value) / scale
        if not difference <= worst_of:  # also NaN
            worst_of, at = difference, label
    return worst_of if worst_of == worst_of else float("inf"), at


@cache
def golden() -> dict[str, tuple[dict[str, float], float]]:
    """Case -> its numbers by label, and what they are held to."""
    with np.load(FILE, allow_pickle=False) as file:
        about, values = json.loads(file["about"].tobytes()), iter(file["values"].tolist())
    numbers = {name: {label: next(values) for label in labels} for name, labels in about["labels"].items()}
    return {name: (found, about["tolerances"].get(name, TOLERANCE)) for name, found in numbers.items()}
