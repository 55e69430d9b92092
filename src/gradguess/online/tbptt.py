"""Truncated backpropagation through time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.errors import check_count
from gradguess.online.rule import Error, Rule, Tensors, Transition


@dataclass(frozen=True)
class TBPTT(Rule):
    """The error of each step goes back over the last `steps` steps, the newest included, at every step.

    The states and the inputs of these steps are kept; their graphs are made anew, with the weights of now (and with new
    random numbers, if the model draws any).

    Bias: all credit beyond `steps` steps. Memory: (n + inputs) · steps for each stream. Time: `steps` times a forward
    and a backward pass of the cell.

    Reference: Williams and Peng 1990.

    Args:
        steps: how many steps an error goes back over, the newest included.
    """

    steps: int = 16

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def start(self, transition: Transition) -> Tensors:
        given = enumerate(_given(transition))
        past = {f"past/{i}": leaf.new_zeros(len(leaf), self.steps - 1, *leaf.shape[1:]) for i, leaf in given}
        return past | {"age": torch.zeros(transition.batch, dtype=torch.long, device=transition.h.device)}

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return self.pulled_back(memory, error.q, transition)[1]

    def pulled_back(self, memory: Tensors, q: Tensor, transition: Transition) -> tuple[Tensor, Tensors]:
        """The error at the state before the oldest step of each stream, and the credit of all steps but the newest."""
        total = {name: torch.zeros_like(p) for name, p in transition.parameters.items()}
        for back in range(1, min(self.steps, int(memory["age"].max()) + 1)):
            there, step = self.past(memory, back, transition)
            before, grads = step.vjp(where(there, q, torch.zeros_like(q)))
            q = where(there, before, q)
            total = {name: total[name] + grads[name] for name in total}
        return q, total

    def past(self, memory: Tensors, back: int, transition: Transition) -> tuple[Tensor, Transition]:
        """Which streams have a step `back` steps ago, and that step. The others repeat the present step in its place.

        `memory` may be that of more streams than `transition` is of.
        """
        there = memory["age"] >= back  # streams that started later have no such past
        before = [memory[f"past/{i}"][:, -back] for i in range(len(_given(transition)))]
        given = iter(where(there, then, now[:1]) for then, now in zip(before, _given(transition), strict=True))
        state, x = tree_map_only(Tensor, lambda _: next(given), (dict(transition.state), transition.x))
        return there, dataclasses.replace(transition, state=state, x=x)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        rows = {
            f"past/{i}": torch.cat([memory[f"past/{i}"], leaf.detach()[:, None]], 1)[:, 1:]
            for i, leaf in enumerate(_given(transition))
        }
        return rows | {"age": memory["age"] + 1}


def _given(transition: Transition) -> list[Tensor]:
    """All tensors of the state and the input that a step starts from."""
    return [leaf for leaf in tree_leaves((dict(transition.state), transition.x)) if isinstance(leaf, Tensor)]


def where(there: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """The values in some rows, and the others elsewhere: a model may not know what to do with a row of zeros."""
    return torch.where(there.view(-1, *[1] * (values.dim() - 1)), values, others)
