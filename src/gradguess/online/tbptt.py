"""Truncated backpropagation through time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.errors import check_count
from gradguess.online.rule import Error, Kept, Rule, Tensors, Transition


@dataclass(frozen=True)
class TBPTT(Rule):
    """The error of each step goes back over the last `steps` steps, the newest included, at every step.

    What is kept are the states and the inputs of these steps; their graphs are made anew, with the weights of now (and
    with new random numbers, if the model draws any).

    Bias: all credit beyond `steps` steps. Memory: (n + inputs) · steps for each stream. Time: `steps` times a forward
    and a backward pass of the cell.

    Reference: Williams and Peng 1990.

    Args:
        steps: how many steps an error goes back over, the newest included.
    """

    steps: int = 16

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def start(self, transition: Transition) -> Kept:
        past = {
            f"past/{i}": leaf.new_zeros(leaf.shape[0], self.steps - 1, *leaf.shape[1:])
            for i, leaf in enumerate(_seen(transition))
        }
        return Kept(past | {"age": torch.zeros(transition.batch, dtype=torch.long, device=transition.h.device)})

    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        return self.back(kept, error.q, transition)[1]

    def back(self, kept: Kept, q: Tensor, transition: Transition) -> tuple[Tensor, Tensors]:
        """The error at the state before the oldest step of each stream, and the credit of all steps but the newest."""
        total = {name: torch.zeros_like(p) for name, p in transition.parameters.items()}
        for back in range(1, min(self.steps, int(kept.rows["age"].max()) + 1)):
            there, step = self.at(kept, back, transition)
            before, grads = step.vjp(chosen(there, q, torch.zeros_like(q)))
            q = chosen(there, before, q)
            total = {name: total[name] + grads[name] for name in total}
        return q, total

    def at(self, kept: Kept, back: int, transition: Transition) -> tuple[Tensor, Transition]:
        """Which streams have a step `back` steps ago, and that step. The others repeat the present step in its place.

        `kept` may be that of more streams than `transition` is of.
        """
        there = kept.rows["age"] >= back  # streams that started later have no such past
        past = [kept.rows[f"past/{i}"][:, -back] for i in range(len(_seen(transition)))]
        seen = iter(chosen(there, then, now[:1]) for then, now in zip(past, _seen(transition), strict=True))
        state, x = tree_map_only(Tensor, lambda _: next(seen), (dict(transition.state), transition.x))
        return there, dataclasses.replace(transition, state=state, x=x)

    def advance(self, kept: Kept, transition: Transition) -> Kept:
        rows = {
            f"past/{i}": torch.cat([kept.rows[f"past/{i}"], leaf.detach()[:, None]], 1)[:, 1:]
            for i, leaf in enumerate(_seen(transition))
        }
        return Kept(rows | {"age": kept.rows["age"] + 1})


def _seen(transition: Transition) -> list[Tensor]:
    """All tensors that a step starts from."""
    return [leaf for leaf in tree_leaves((dict(transition.state), transition.x)) if isinstance(leaf, Tensor)]


def chosen(there: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """The values in some rows, and the others elsewhere: a model may not know what to do with a row of zeros."""
    return torch.where(there.view(-1, *[1] * (values.dim() - 1)), values, others)
