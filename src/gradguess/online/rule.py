"""What a rule is: how the influence of the past on the state is kept, and how it turns into a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradguess.online.transition import Error, Tensors, Transition


@dataclass(frozen=True)
class Kept:
    """What a rule keeps from step to step. A step makes a new one and never writes to the old one.

    Attributes:
        rows: tensors with one row per stream; zeros in a row are a stream that starts.
        shared: tensors for all streams together, such as a basis.
    """

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor, by name."""
        return {name: (value.shape, value.dtype) for name, value in {**self.rows, **self.shared}.items()}

    def select(self, rows: Tensor | None) -> Kept:
        """The same for some of the streams; None: for all."""
        return self if rows is None else Kept({name: value[rows] for name, value in self.rows.items()}, self.shared)

    def replace(self, rows: Tensor | None, part: Kept) -> Kept:
        """The streams `rows` (None: all) as they are in `part`, the others as they are here."""
        if rows is None:
            return part
        own = {name: value.index_copy(0, rows, part.rows[name]) for name, value in self.rows.items()}
        return Kept(own, part.shared)

    def cleared(self, rows: Tensor) -> Kept:
        """The streams `rows` start anew."""
        return Kept({name: value.index_fill(0, rows, 0) for name, value in self.rows.items()}, self.shared)

    def joined(self, other: Kept) -> Kept:
        """The union of both; where names are the same, the values of `other`."""
        return Kept({**self.rows, **other.rows}, {**self.shared, **other.shared})


class Rule(ABC):
    """A rule keeps `P_t ≈ dh_t/dθ` in some form.

    The gradient of the loss at step t is `∂L_t/∂θ + q P_{t-1}` with `q = dL_t/dh_{t-1}`: the first term is the newest
    step, which `Online` computes exactly for every rule, and `credit` supplies the second. `look` may then turn what is
    kept, and `advance` makes `P_t = J P_{t-1} + F`, or what the rule has in its place.
    """

    @abstractmethod
    def start(self, transition: Transition) -> Kept:
        """What is kept before the first step."""

    @abstractmethod
    def credit(self, kept: Kept, error: Error, transition: Transition) -> Tensors:
        """`Σ_b q_b P_b`, for each parameter flat or in its shape. Parameters without credit may be missing."""

    def look(self, kept: Kept, error: Error | None, transition: Transition) -> Kept:
        """What is kept, seen anew once the error is known. A rule without a basis has nothing to do here.

        `kept` is that of all streams, so that a new basis reaches those that are skipped in this step, too; `error` and
        `transition` are those of the others. `error` is None without a loss.
        """
        return kept

    def hear(self, kept: Kept, error: Error, transition: Transition) -> Kept:
        """What is kept once a late error is known. `transition` is that of its own step, with the weights of then."""
        return self.look(kept, error, transition)

    @abstractmethod
    def advance(self, kept: Kept, transition: Transition) -> Kept:
        """What is kept after the step."""


def zeros(transition: Transition, rank: int) -> Tensors:
    """(batch, rank, size) of zeros for each parameter."""
    h = transition.h
    return {f"P/{name}": h.new_zeros(h.shape[0], rank, p.numel()) for name, p in transition.parameters.items()}


def influences(kept: Kept) -> Tensors:
    """`P` for each parameter."""
    return {name.removeprefix("P/"): P for name, P in kept.rows.items() if name.startswith("P/")}


def contracted(c: Tensor, kept: Kept) -> Tensors:
    """`Σ_b c_b P_b`: c (batch, rank), P (batch, rank, size)."""
    return {name: c.reshape(1, -1) @ P.flatten(0, 1) for name, P in influences(kept).items()}


def carried(A: Tensor, kept: Kept, F: Tensors) -> Tensors:
    """`A P + F`: A (batch, rank, rank). `F` is overwritten, so that there are never three of this size.

    Autograd may return one tensor for two parameters, or for a parameter and the state: these are copied first.
    """
    uses = Counter(value.untyped_storage().data_ptr() for value in (A, *F.values()))
    alone = {name: new if uses[new.untyped_storage().data_ptr()] == 1 else new.clone() for name, new in F.items()}
    return {f"P/{name}": new.contiguous().baddbmm_(A, kept.rows[f"P/{name}"]) for name, new in alone.items()}
