"""The digits of scikit-learn, 8 × 8 pixels: 1437 + 360 after a fixed shuffle."""

from __future__ import annotations

from gradguess_lab.datasets.source import Arrays, Source, shuffled_split


def make() -> Arrays:
    from sklearn.datasets import load_digits  # help needs none

    images, labels = load_digits(return_X_y=True)
    return shuffled_split(images.reshape(-1, 8, 8) * 15, labels, test=360)  # 0 … 16 -> 0 … 240


SOURCE = Source(
    make,
    classes=10,
    fingerprint=(
        *(73.30718, 13518.79648, -0.0553, 4.52818, 28.62978, 0.04926),
        *(73.08398, 13488.75977, 0.42677, 4.34167, 27.34722, 0.10252),
    ),
    kind="image",
    scale=(0.2873, 0.3539),
)
