"""W⊥ through time in blocks: the basis cuts once in a block of steps, and not at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition, carried, contracted, influences
from gradguess.online.tbptt import TBPTT, chosen
from gradguess.online.wperp import WPerp, noted


@dataclass(frozen=True)
class Blockwise(Rule):
    """`P̃_t = V'ᵀ (Φ V P̃_{t-m} + Σ_s Φ_s F_s)` every m steps: Φ and Φ_s are products of the J of these steps.

    V' is the basis that is found there, V the one before it, and m the `refresh` of W⊥. Within a block of m steps
    states and inputs are kept. An error goes back over them exactly, and where the block began it gets the credit
    `(q V) P̃`. So what the steps of a block turn out of the basis counts until the block ends, where W⊥ alone loses it
    at once. With k = n this is RTRL.

    Bias: what is outside of the span of V where a block begins. The steps of a block are made anew with the weights of
    now.
    Memory: that of W⊥, and m (n + inputs) for each stream. Time: m / 2 vjps for the error, on average; at the end of a
    block m times k vjps of the cell, and k² p.

    Reference: Schmidhuber 1992 (backpropagation within blocks, exact influence between them); in a basis: this library.

    Args:
        inner: k, the basis, and `refresh`, the steps of a block.
    """

    inner: WPerp = field(default_factory=lambda: WPerp(refresh=16))

    def __post_init__(self) -> None:
        if not isinstance(self.inner, WPerp):
            found = type(self.inner).__name__
            raise InputError(f"Blockwise: expected a WPerp, as in Blockwise(WPerp(k=16, refresh=16)), found {found}.")

    @property
    def block(self) -> TBPTT:
        """Keeps the steps of the block, and goes back over them."""
        return TBPTT(self.inner.refresh + 1)

    def start(self, transition: Transition) -> Kept:
        return self.inner.start(transition).joined(self.block.start(transition))

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        q, within = self.block.back(kept, error.q, transition)
        before = contracted(q @ kept.shared["V"], kept)
        return {name: ours + before[name].view_as(ours) for name, ours in within.items()}

    def look(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        """Search for a new basis from time to time, as W⊥ does; where there is one, or no room, the block ends."""
        shared = self.inner.look(Kept({}, kept.shared), error, transition).shared
        full = int(kept.rows["age"].max()) == self.inner.refresh
        if shared["V"] is kept.shared["V"] and not full:
            return kept.joined(Kept({}, shared))
        age = torch.zeros_like(kept.rows["age"])
        return kept.joined(Kept({**self._carried(kept, shared["V"], transition), "age": age}, shared))

    def hear(self, kept: Kept, error: Error, transition: Transition) -> Kept:
        """A late error says where errors point. It ends no block: it came with weights and steps of its own."""
        return kept.joined(Kept({}, {"S": noted(kept, error)}))

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        return kept.joined(self.block.advance(kept, transition))

    def _carried(self, kept: Kept, new: Tensor, transition: Transition) -> Tensors:
        """The influence at the end of the block in the new basis."""
        age, V = kept.rows["age"], kept.shared["V"]
        C = new.T.expand(len(age), *new.T.shape)
        total = {name: torch.zeros_like(P) for name, P in influences(kept).items()}
        for back in range(1, int(age.max()) + 1):
            there, step = self.block.at(kept, back, transition)
            CJ, CF = step.vjps(chosen(there, C, torch.zeros_like(C)))
            C = chosen(there, CJ, C)
            for name, F in total.items():
                F += CF.pop(name)
        return carried(C @ V, kept, total)
