"""The loops by name: the methods and variants of `experiments.methods`, and what the benchmarks alone know of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradguess_lab.bench.cases import Setting
from gradguess_lab.bench.loops import GuessedLoop, Loop
from gradguess_lab.methods import settings_of

BACKPROP = "backprop"  # the loop that all others are compared with
TIMED = (
    *("weight", "activation", "wt", "wperp", "wperp-subspace", "wperp-svd"),
    *("feedback-direct", "feedback-chained", "feedback-corrected", "feedback-direct-rare", "feedback-chained-rare"),
)
MEASURED = ("backprop", "checkpoint-all", "checkpoint-sqrt", "store", "replay", "feedback-replay", "pieces-replay")
# These decompose or multiply a matrix for every sample: too slow for rounds on the whole batch, except W⊥-NS on a GPU.
PER_SAMPLE = {"cpu": ("wperp-svd", "wperp-ns", "wp"), "cuda": ("wperp-svd", "wp")}
STRIDES: dict[str, Callable[[int], int]] = {  # layers from one checkpoint to the next
    "checkpoint-all": lambda depth: 1,
    "checkpoint-sqrt": lambda depth: max(1, math.isqrt(depth)),
}


def check_methods(names: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    """The names that were asked for, each of them known; `default` if none were."""
    for name in names:
        settings_of(name)
    return names or default


def make_loop(name: str, case: Setting, compiled: bool = False, own: Mapping[str, Any] | None = None) -> Loop:
    """The loop that `name` stands for, on the network and the data of `case`; `own` are further settings of it."""
    model, (x, y), precision = case.network(), case.data(), case.precision
    if name == BACKPROP:
        return Loop(model, x, y, compiled, precision)
    settings = {**settings_of(name), **(own or {}), "compile": compiled}
    if name in STRIDES:
        settings["sites"] = str(max(2, math.ceil(case.depth / STRIDES[name](case.depth))))
    if name == "pieces-replay":
        settings["sites"] = str(max(2, math.isqrt(case.depth)))
    return GuessedLoop(case.config(settings), model, x, y, precision)
