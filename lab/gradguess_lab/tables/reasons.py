"""What is known about the numbers that differ: shown under a table that has such lines."""

from __future__ import annotations

from collections.abc import Iterable

from gradguess_lab.paper_numbers import Published

_MEASURED = (
    "The paper does not state the step or the batch at which it measured bias and variance: the figure over training "
    "shows ours at every diagnosed epoch, with its values as lines. It takes the variance from one draw per sample, "
    "and ours is the exact expectation: the noise of that draw is not in our intervals."
)
_REASONS = {
    "variance": _MEASURED,
    "bias": _MEASURED,
    "rank": (
        "The rank is that of W M with M the ReLU mask: it counts active units, and varies with the sample and with the "
        "initial weights. Ours is the mean over a batch; the paper gives one number, and does not say of what."
    ),
}


def reasons(entries: Iterable[Published]) -> list[str]:
    """What may be said of these entries, each sentence once."""
    return list(dict.fromkeys(_REASONS[entry.quantity] for entry in entries if entry.quantity in _REASONS))
