"""Why a number of ours may differ from the paper's: shown under a table beside the lines that do differ."""

from __future__ import annotations

from gradguess.experiments.paper_numbers import Published

__all__ = ["reason"]

_UNSTATED_STEP = (
    "The paper does not state the step at which bias and variance were measured; both fall with the gradient "
    "during training. The order of the methods is what the claims compare."
)

_REASONS = {
    ("wp", "bias"): (
        "The exact bias of Wᴾ is zero at this layer: what is printed, in the paper and here, is the rounding "
        "of the arithmetic and the regularisation σ."
    ),
    (None, "variance"): _UNSTATED_STEP,
    (None, "bias"): _UNSTATED_STEP,
    (None, "rank"): (
        "The rank is that of W M with M the ReLU mask: it counts active units, and varies with the sample "
        "and with the initial weights. Ours is the mean over a batch; the paper gives one number."
    ),
}


def reason(entry: Published) -> str | None:
    """The most specific explanation on record."""
    return _REASONS.get((entry.method, entry.quantity)) or _REASONS.get((None, entry.quantity))
