"""What the paper says in words, checked on our numbers: `CLAIMS` lists it in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.checks import (
    Check,
    agree,
    ascending,
    at_least,
    every,
    flat,
    gap_grows,
    gap_near,
    outcome,
    slower_than_width,
)
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Row, table

_MOSTLY = math.sqrt(0.5)  # of the gradient's norm, which is half of its square

# A sentence of the paper with what the test needs to be told, the numbers that it gives, and the check.
CLAIMS: tuple[tuple[str, str, Check], ...] = (
    ("Accuracy drops sharply at k = 1 (width 128).", "0.275 < 0.324", ascending("wperp 128 1", "wperp 128 10")),
    ("With k = rank, W⊥ is almost identical to Wᵀ (width 128, margin 0.01).", "0.311, 0.312",
     agree("wperp 128 rank", "wt 128", 0.01)),
    ("Small k beats k = rank (width 128).", "k = 10: 0.311 < 0.324; k = 25: 0.311 < 0.323",
     every({f"k = {k}": ascending("wperp 128 rank", f"wperp 128 {k}") for k in (10, 25)})),
    ("Ten directions hold most of the gradient: more than half of its square (width 128).", "figure",
     at_least((1, 2, 3), 128, _MOSTLY)),
    ("Ten directions hold most of the gradient: more than half of its square (width 512).", "figure",
     at_least((1, 2, 3), 512, _MOSTLY)),
    ("Layer 3 has rank 10: ten directions hold its whole gradient (more than 0.999 of its norm).", "rank 10",
     every({width: at_least((3,), width, 0.999) for width in (128, 512)})),
    ("W⊥ has a smaller variance than Wᵀ (width 128).", "1.03e−5 < 1.50e−4",
     ascending("wperp 128 10 variance", "wt 128 variance")),
    ("W⊥ has a smaller bias than Wᵀ (width 128).", "2.86e−5 < 2.75e−4",
     ascending("wperp 128 10 bias", "wt 128 bias")),
    ("W⊥ has a smaller bias than W⊥-bottom (width 128).", "2.86e−5 < 2.83e−4",
     ascending("wperp 128 10 bias", "wperp-bottom 128 10 bias")),
    ("W⊥ is no closer to the identity than Wᵀ or W⊥-bottom in covariance norm (width 128, margin 0.004).",
     "0.085, 0.084; 0.085, 0.085",
     every({"Wᵀ": agree("wperp 128 10 covariance_norm", "wt 128 covariance_norm", 0.004),
            "W⊥-bottom": agree("wperp 128 10 covariance_norm", "wperp-bottom 128 10 covariance_norm", 0.004)})),
    ("Training with W⊥ reaches a smaller gradient than with W⊥-bottom (width 128).", "in words",
     ascending("wperp 128 10 gradient_norm", "wperp-bottom 128 10 gradient_norm")),
    ("At width 64, W⊥ and Wᵀ do not differ (margin 0.01).", "0.268, 0.268", agree("wperp 64 10", "wt 64", 0.01)),
    ("At width 512, W⊥ is almost ten points ahead of Wᵀ.", "gap +0.087",
     gap_near("wt 512", "wperp 512 10", 0.087, rounding=0.001)),
    ("The gap between W⊥ and Wᵀ grows with the width.", "64: +0.000, 128: +0.011, 256: +0.058, 512: +0.087",
     gap_grows("wt {}", "wperp {} 10")),
    ("The variance of W⊥ hardly changes with the width: it goes as width to a power within ± 0.25.",
     "128: 1.03e−5, 256: 6.33e−6 (power −0.70)", flat("wperp {} 10 variance", 0.25)),
    ("The k that holds most of the gradient grows more slowly than the width n: 0.9 of its norm with k ~ n^a, "
     "a < 0.5.", "in words", every({f"layer {layer}": slower_than_width(layer, 0.9, 0.5) for layer in (1, 2)})),
    ("Weight perturbation < activation perturbation < Wᵀ at every width.",
     "64: 0.121 < 0.201 < 0.268 … 512: 0.177 < 0.319 < 0.494",
     every({w: ascending(f"weight {w}", f"activation {w}", f"wt {w}") for w in WIDTHS})),
    ("Backpropagation stays far ahead of every guess.", "64: 0.268 < 0.536 … 512: 0.581 < 1.000",
     every({w: ascending(f"wperp {w} 10", f"backprop {w}") for w in WIDTHS})),
    ("W⊥-NS is as accurate as W⊥ (margin 0.02).", "128: 0.326, 0.324; 512: 0.594, 0.581",
     every({w: agree(f"wperp-ns {w} 10 nearest", f"wperp {w} 10", 0.02) for w in (128, 512)})),
    ("The same with the threshold placed between σ_k and σ_k+1, which the paper does not do (margin 0.02).", "–",
     every({w: agree(f"wperp-ns {w} 10 placed", f"wperp {w} 10", 0.02) for w in (128, 512)})),
    ("W⊥-NS beats Wᵀ in all cases.", "128: 0.312 < 0.326; 512: 0.486 < 0.594",
     every({w: ascending(f"wt {w}", f"wperp-ns {w} 10 nearest") for w in (128, 512)})),
    ("At width 256, Wᴾ is the least accurate and W⊥ the most.", "0.367 < 0.375 < 0.433",
     ascending("wp 256", "wt 256", "wperp 256 10")),
    ("At width 256, W⊥ has the smallest variance and Wᴾ the largest.", "6.33e−6 < 7.04e−5 < 1.75e−4",
     ascending("wperp 256 10 variance", "wt 256 variance", "wp 256 variance")),
    ("At width 256, Wᴾ has the smallest bias and Wᵀ the largest.", "1.35e−8 < 3.63e−5 < 1.68e−4",
     ascending("wp 256 bias", "wperp 256 10 bias", "wt 256 bias")),
)  # fmt: skip


@table(
    "claims",
    "Claims",
    "Accuracies are those of the training set; bias, variance and norms are those of layer 1. W⊥ has each sample's own "
    "subspace where that was run. Brackets hold the 95 % interval of a difference. Seeds: the fewest on any side.",
)
def claims_table(runs: Sequence[Run]) -> Iterator[Row]:
    for says, paper, check in CLAIMS:
        found = outcome(check, runs)
        ours = {"Ours": found.ours or "–", "Verdict": found.verdict, "Seeds": found.seeds}
        yield {"The paper says": says, "Its numbers": paper, **ours}
