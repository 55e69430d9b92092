"""What the paper says in words, checked on our numbers: `CLAIMS` lists it in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradguess.experiments.tables.checks import (
    Check,
    Outcome,
    Side,
    agree,
    at_least,
    beats,
    below,
    every,
    gap_grows,
    gap_near,
)
from gradguess.experiments.tables.runs import Run
from gradguess.experiments.tables.table import Cell, Table, text

__all__ = ["CLAIMS", "Claim", "claims_table"]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what it reports, and the check of it."""

    slug: str
    says: str
    paper: str
    check: Check


def _wperp(width: int, quantity: str = "train_accuracy", k: int | str = 10, **rest: object) -> Side:
    return Side("wperp", width, quantity, k, **rest)  # type: ignore[arg-type]


def _wt(width: int, quantity: str = "train_accuracy", layer: int | None = None) -> Side:
    return Side("wt", width, quantity, layer=layer)


_WIDTHS = (64, 128, 256, 512)
_MOSTLY = math.sqrt(0.5)  # more than half of the squared norm

CLAIMS = (
    Claim("k10-beats-k1", "Accuracy drops sharply at k = 1 (width 128).", "0.324 against 0.275",
          beats(_wperp(128), _wperp(128, k=1))),
    Claim("rank-is-wt", "With k = rank, W⊥ is almost identical to Wᵀ (width 128).", "0.311, 0.312",
          agree(_wperp(128, k="rank"), _wt(128), 0.01)),
    Claim("small-k", "Small k (10, 25) beats k = rank (width 128).", "0.324 and 0.323 against 0.311",
          every(beats(_wperp(128), _wperp(128, k="rank")), beats(_wperp(128, k=25), _wperp(128, k="rank")))),
    Claim("overlap-128", "Ten directions hold most of the gradient at width 128.", "figure",
          at_least((1, 2, 3), 128, 10, _MOSTLY)),
    Claim("overlap-512", "Ten directions hold most of the gradient at width 512.", "figure",
          at_least((1, 2, 3), 512, 10, _MOSTLY)),
    Claim("layer-3", "Layer 3 has rank 10: ten directions hold its whole gradient.", "rank 10",
          every(at_least((3,), 128, 10, 0.999), at_least((3,), 512, 10, 0.999))),
    Claim("variance-wt", "W⊥ has a smaller variance than Wᵀ (width 128, layer 1).", "1.03e−5 against 1.50e−4",
          below(_wperp(128, "variance", layer=1), _wt(128, "variance", 1))),
    Claim("bias-wt", "W⊥ has a smaller bias than Wᵀ (width 128, layer 1).", "2.86e−5 against 2.75e−4",
          below(_wperp(128, "bias", layer=1), _wt(128, "bias", 1))),
    Claim("bias-bottom", "W⊥ has a smaller bias than W⊥-bottom (width 128, layer 1).",
          "2.86e−5 against 2.83e−4",
          below(_wperp(128, "bias", layer=1), Side("wperp-bottom", 128, "bias", 10, 1))),
    Claim("covariance", "W⊥, W⊥-bottom and Wᵀ are equally far from the identity (width 128).",
          "0.085, 0.085, 0.084",
          every(agree(_wperp(128, "covariance_norm", layer=1), _wt(128, "covariance_norm", 1), 0.004),
                agree(_wperp(128, "covariance_norm", layer=1),
                      Side("wperp-bottom", 128, "covariance_norm", 10, 1), 0.004))),
    Claim("gradient-norm", "Training with W⊥ reaches a smaller gradient than with W⊥-bottom.", "in words",
          below(_wperp(128, "gradient_norm", layer=1), Side("wperp-bottom", 128, "gradient_norm", 10, 1))),
    Claim("gap-64", "At width 64 W⊥ and Wᵀ do not differ.", "gap 0.000", gap_near(_wperp(64), _wt(64), 0.0)),
    Claim("gap-512", "At width 512 W⊥ beats Wᵀ by almost ten points.", "gap +0.087",
          gap_near(_wperp(512), _wt(512), 0.087)),
    Claim("gap-grows", "The gap between W⊥ and Wᵀ grows with the width.", "64: 0.000 … 512: +0.087",
          gap_grows(_wperp, _wt, _WIDTHS)),
    Claim("order", "Weight perturbation < activation perturbation < Wᵀ at every width.", "table",
          every(*(check for w in _WIDTHS for check in (
              beats(Side("activation", w), Side("weight", w)), beats(_wt(w), Side("activation", w)))))),
    Claim("backprop", "Backpropagation stays far ahead of every guess.",
          "0.536 against 0.268 … 1.0 against 0.581",
          every(*(beats(Side("backprop", w), _wperp(w)) for w in _WIDTHS))),
    Claim("ns-accuracy", "W⊥-NS is as accurate as W⊥.", "0.326, 0.324; 0.594, 0.581",
          every(*(agree(Side("wperp-ns", w, k=10), _wperp(w), 0.03) for w in (128, 512)))),
    Claim("ns-beats-wt", "W⊥-NS beats Wᵀ in all cases.", "0.326 against 0.312; 0.594 against 0.486",
          every(*(beats(Side("wperp-ns", w, k=10), _wt(w)) for w in (128, 512)))),
    Claim("ns-faster", "W⊥-NS is faster than W⊥ by SVD (one device).", "9 min against 1 h; 6 h against 40 h",
          every(*(below(Side("wperp-ns", w, "step_ms", 10), _wperp(w, "step_ms", solver="svd"), True)
                  for w in (128, 512)))),
    Claim("ns-memory", "W⊥-NS needs less memory than W⊥ by SVD at width 512 (one device).", "about 10 × less",
          below(Side("wperp-ns", 512, "peak_memory_mb", 10),
                _wperp(512, "peak_memory_mb", solver="svd"), True)),
    Claim("wp-accuracy", "Wᴾ is the least accurate at width 256, W⊥ the most.", "0.367 < 0.375 < 0.433",
          every(beats(_wt(256), Side("wp", 256)), beats(_wperp(256), _wt(256)))),
    Claim("wp-variance", "Wᴾ has the largest variance at width 256, W⊥ the smallest (layer 1).",
          "1.75e−4 > 7.04e−5 > 6.33e−6",
          every(below(_wt(256, "variance", 1), Side("wp", 256, "variance", layer=1)),
                below(_wperp(256, "variance", layer=1), _wt(256, "variance", 1)))),
    Claim("wp-bias", "Wᴾ has the smallest bias at width 256 (layer 1).", "1.35e−8",
          below(Side("wp", 256, "bias", layer=1), _wperp(256, "bias", layer=1))),
)  # fmt: skip


def claims_table(runs: Sequence[Run]) -> Table:
    return Table(
        "claims",
        "Claims",
        ("The paper says", "Its numbers", "Ours", "Verdict"),
        tuple(_row(claim, claim.check(runs)) for claim in CLAIMS),
        "What the paper concludes, checked on our runs in its setting.",
    )


def _row(claim: Claim, outcome: Outcome) -> tuple[Cell, ...]:
    return (
        text(claim.says),
        text(claim.paper),
        text(outcome.ours or "–"),
        text(outcome.verdict, outcome.verdict),
    )
