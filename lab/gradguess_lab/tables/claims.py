"""What the paper says in words, checked on our numbers: `CLAIMS` lists it in the paper's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.checks import agree, ascending, at_least, gap_near
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.sides import Check, Outcome, Side, every
from gradguess_lab.tables.table import Cell, Table, number, text
from gradguess_lab.tables.trends import flat, gap_grows, slower_than_width


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with what the test needs to be told, the numbers it gives, and the check."""

    says: str
    paper: str
    check: Check


def _wperp(width: int, quantity: str = "train_accuracy", k: int | str = 10) -> Side:
    return Side("wperp", width, quantity, k, _layer(quantity))


def _bottom(width: int, quantity: str) -> Side:
    return Side("wperp-bottom", width, quantity, 10, _layer(quantity))


def _wt(width: int, quantity: str = "train_accuracy") -> Side:
    return Side("wt", width, quantity, layer=_layer(quantity))


def _wp(width: int, quantity: str = "train_accuracy") -> Side:
    return Side("wp", width, quantity, layer=_layer(quantity))


def _ns(width: int, threshold: str = "nearest") -> Side:
    return Side("wperp-ns", width, k=10, threshold=threshold)


def _layer(quantity: str) -> int | None:
    """Bias and the like are compared at layer 1, the one layer that the paper names."""
    return 1 if quantity in {"variance", "bias", "covariance_norm", "gradient_norm"} else None


_MOSTLY = math.sqrt(0.5)  # of the gradient's norm, which is half of its square

CLAIMS = (
    Claim(
        "Accuracy drops sharply at k = 1 (width 128).",
        "0.275 < 0.324",
        ascending(_wperp(128, k=1), _wperp(128)),
    ),
    Claim(
        "With k = rank, W⊥ is almost identical to Wᵀ (width 128, margin 0.01).",
        "0.311, 0.312",
        agree(_wperp(128, k="rank"), _wt(128), 0.01),
    ),
    Claim(
        "Small k beats k = rank (width 128).",
        "k = 10: 0.311 < 0.324; k = 25: 0.311 < 0.323",
        every(
            ascending(_wperp(128, k="rank"), _wperp(128), name="k = 10"),
            ascending(_wperp(128, k="rank"), _wperp(128, k=25), name="k = 25"),
        ),
    ),
    Claim(
        "Ten directions hold most of the gradient: more than half of its square (width 128).",
        "figure",
        at_least((1, 2, 3), 128, 10, _MOSTLY),
    ),
    Claim(
        "Ten directions hold most of the gradient: more than half of its square (width 512).",
        "figure",
        at_least((1, 2, 3), 512, 10, _MOSTLY),
    ),
    Claim(
        "Layer 3 has rank 10: ten directions hold its whole gradient (more than 0.999 of its norm).",
        "rank 10",
        every(*(at_least((3,), width, 10, 0.999, name=str(width)) for width in (128, 512))),
    ),
    Claim(
        "W⊥ has a smaller variance than Wᵀ (width 128).",
        "1.03e−5 < 1.50e−4",
        ascending(_wperp(128, "variance"), _wt(128, "variance")),
    ),
    Claim(
        "W⊥ has a smaller bias than Wᵀ (width 128).",
        "2.86e−5 < 2.75e−4",
        ascending(_wperp(128, "bias"), _wt(128, "bias")),
    ),
    Claim(
        "W⊥ has a smaller bias than W⊥-bottom (width 128).",
        "2.86e−5 < 2.83e−4",
        ascending(_wperp(128, "bias"), _bottom(128, "bias")),
    ),
    Claim(
        "W⊥ is no closer to the identity than Wᵀ or W⊥-bottom in covariance norm (width 128, margin 0.004).",
        "0.085, 0.084; 0.085, 0.085",
        every(
            agree(_wperp(128, "covariance_norm"), _wt(128, "covariance_norm"), 0.004, name="Wᵀ"),
            agree(_wperp(128, "covariance_norm"), _bottom(128, "covariance_norm"), 0.004, name="W⊥-bottom"),
        ),
    ),
    Claim(
        "Training with W⊥ reaches a smaller gradient than with W⊥-bottom (width 128).",
        "in words",
        ascending(_wperp(128, "gradient_norm"), _bottom(128, "gradient_norm")),
    ),
    Claim(
        "At width 64, W⊥ and Wᵀ do not differ (margin 0.01).",
        "0.268, 0.268",
        agree(_wperp(64), _wt(64), 0.01),
    ),
    Claim(
        "At width 512, W⊥ is almost ten points ahead of Wᵀ.",
        "gap +0.087",
        gap_near(_wt(512), _wperp(512), 0.087, rounding=0.001),
    ),
    Claim(
        "The gap between W⊥ and Wᵀ grows with the width.",
        "64: +0.000, 128: +0.011, 256: +0.058, 512: +0.087",
        gap_grows(_wt, _wperp, WIDTHS),
    ),
    Claim(
        "The variance of W⊥ hardly changes with the width: it goes as width to a power within ± 0.25.",
        "128: 1.03e−5, 256: 6.33e−6 (power −0.70)",
        flat(lambda width: _wperp(width, "variance"), WIDTHS, 0.25),
    ),
    Claim(
        "The k that holds most of the gradient grows more slowly than the width n: 0.9 of its norm with k ~ n^a, "
        "a < 0.5.",
        "in words",
        every(*(slower_than_width(layer, WIDTHS, 0.9, 0.5) for layer in (1, 2))),
    ),
    Claim(
        "Weight perturbation < activation perturbation < Wᵀ at every width.",
        "64: 0.121 < 0.201 < 0.268 … 512: 0.177 < 0.319 < 0.494",
        every(*(ascending(Side("weight", w), Side("activation", w), _wt(w), name=str(w)) for w in WIDTHS)),
    ),
    Claim(
        "Backpropagation stays far ahead of every guess.",
        "64: 0.268 < 0.536 … 512: 0.581 < 1.000",
        every(*(ascending(_wperp(w), Side("backprop", w), name=str(w)) for w in WIDTHS)),
    ),
    Claim(
        "W⊥-NS is as accurate as W⊥ (margin 0.02).",
        "128: 0.326, 0.324; 512: 0.594, 0.581",
        every(*(agree(_ns(w), _wperp(w), 0.02, name=str(w)) for w in (128, 512))),
    ),
    Claim(
        "The same with the threshold placed between σ_k and σ_k+1, which the paper does not do (margin 0.02).",
        "–",
        every(*(agree(_ns(w, "placed"), _wperp(w), 0.02, name=str(w)) for w in (128, 512))),
    ),
    Claim(
        "W⊥-NS beats Wᵀ in all cases.",
        "128: 0.312 < 0.326; 512: 0.486 < 0.594",
        every(*(ascending(_wt(w), _ns(w), name=str(w)) for w in (128, 512))),
    ),
    Claim(
        "At width 256, Wᴾ is the least accurate and W⊥ the most.",
        "0.367 < 0.375 < 0.433",
        ascending(_wp(256), _wt(256), _wperp(256)),
    ),
    Claim(
        "At width 256, W⊥ has the smallest variance and Wᴾ the largest.",
        "6.33e−6 < 7.04e−5 < 1.75e−4",
        ascending(_wperp(256, "variance"), _wt(256, "variance"), _wp(256, "variance")),
    ),
    Claim(
        "At width 256, Wᴾ has the smallest bias and Wᵀ the largest.",
        "1.35e−8 < 3.63e−5 < 1.68e−4",
        ascending(_wp(256, "bias"), _wperp(256, "bias"), _wt(256, "bias")),
    ),
)


def claims_table(runs: Sequence[Run]) -> Table:
    return Table(
        "claims",
        "Claims",
        ("The paper says", "Its numbers", "Ours", "Verdict", "Seeds"),
        tuple(_row(claim, claim.check(runs)) for claim in CLAIMS),
        "Accuracies are those of the training set; bias, variance and norms are those of layer 1. W⊥ has each sample's "
        "own subspace where that was run. Brackets hold the 95 % interval of a difference. Seeds: the fewest on any "
        "side.",
    )


def _row(claim: Claim, outcome: Outcome) -> tuple[Cell, ...]:
    return (
        text(claim.says),
        text(claim.paper),
        text(outcome.ours or "–"),
        text(outcome.verdict, outcome.verdict),
        number(outcome.seeds, "d"),
    )
