"""W⊥ through time in blocks: the basis cuts once in a block of steps, and not at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.online.rule import Error, Rule, Tensors, Transition, advanced, credit_through, influence
from gradguess.online.tbptt import TBPTT, where
from gradguess.online.wperp import WPerp


@dataclass(frozen=True)
class Blockwise(Rule):
    """`P̃_t = V'ᵀ (Φ V P̃_{t-m} + Σ_s Φ_s F_s)` every m steps: Φ and Φ_s are products of the J of these steps.

    V' is the basis that is found there, V the one before it, and m the `refresh` of W⊥. Within a block of m steps
    states and inputs are memory. An error goes back over them exactly, and where the block began it gets the credit
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

    def start(self, transition: Transition) -> Tensors:
        return self.inner.start(transition) | self.block.start(transition)

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        q, within = self.block.pulled_back(memory, error.q, transition)
        before = credit_through(q @ memory["shared/V"], memory)
        return {name: inside + before[name].view_as(inside) for name, inside in within.items()}

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        """The memory with this error. Where W⊥ finds a new basis, or the block is full, the block has ended."""
        found = self.inner.look({name: memory[name] for name in ("shared/V", "shared/S")}, error, transition)
        new, age = found["shared/V"], memory["age"]
        if new is not memory["shared/V"] or int(age.max()) == self.inner.refresh:
            found |= self._at_end(memory, new, transition) | {"age": torch.zeros_like(age)}
        return memory | found

    def look_late(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        """The memory with a late error. No block ends: the error came with weights and steps of its own."""
        return self.inner.with_error(memory, error)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        return memory | self.block.advance(memory, transition)

    def _at_end(self, memory: Tensors, new: Tensor, transition: Transition) -> Tensors:
        """The influence at the end of the block in the new basis."""
        age = memory["age"]
        C = new.T.expand(len(age), *new.T.shape)
        total = {name[2:]: torch.zeros_like(P) for name, P in influence(memory).items()}
        for back in range(1, int(age.max()) + 1):
            there, step = self.block.past(memory, back, transition)
            CJ, CF = step.vjps(where(there, C, torch.zeros_like(C)))
            C = where(there, CJ, C)
            for name, F in total.items():
                F += CF.pop(name)
        return advanced(C @ memory["shared/V"], memory, total)
