"""How well a random direction points along a gradient of N numbers: its cosine is of the order of 1/√N."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gradguess.experiments.tables.compare import NOT_RUN
from gradguess.experiments.tables.sides import Outcome, show_interval, shown_number
from gradguess.experiments.tables.welch import slope

DRAWS = 1000
INPUTS, CLASSES = 40, 10  # of MNIST-1D
MARGIN = 0.05


def parameters(width: int) -> int:
    """Weights of the paper's network: three hidden layers, no biases.

    >>> parameters(128)
    39168
    """
    return width * (INPUTS + 2 * width + CLASSES)


def cosines(numbers: int, seed: int = 0) -> list[float]:
    """The cosine of Gaussian directions with any one vector: by symmetry the first coordinate over the length."""
    draw = random.Random(seed)
    found = []
    for _ in range(DRAWS):
        first = draw.gauss(0, 1)
        others = draw.gammavariate((numbers - 1) / 2, 2)  # the square of the length of all other coordinates
        found.append(first / math.sqrt(first**2 + others))
    return found


def falls_as_root(widths: Sequence[int]) -> Outcome:
    """The size of the cosine falls as `N^a` with `a` within the margin of −1/2."""
    sizes = {width: math.sqrt(sum(c * c for c in cosines(parameters(width), width)) / DRAWS) for width in widths}
    rise = slope([(math.log(parameters(width)), math.log(size)) for width, size in sizes.items()])
    if rise is None:
        return Outcome(NOT_RUN)
    shown = ", ".join(f"N = {parameters(width):,}: {shown_number(size)}" for width, size in sizes.items())
    return Outcome(rise.minus(-0.5).is_small(MARGIN), f"{shown}; exponent {show_interval(rise)}")
