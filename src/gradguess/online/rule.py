"""`Rule`: how the influence of the past on the state is kept, and how it becomes a gradient.

A rule's memory is a mapping from names to tensors. Those whose names start with "shared/" are for all streams together,
such as a basis; all others have one row per stream, and zeros in a row are a stream that starts. A step makes a new
memory and never writes to the old one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from torch import Tensor

from gradguess.online.transition import Error, Tensors, Transition

SHARED = "shared/"


def of_streams(memory: Tensors, rows: Tensor | None) -> Tensors:
    """The memory of some streams; None: of all."""
    return memory if rows is None else {n: v if n.startswith(SHARED) else v[rows] for n, v in memory.items()}


def with_streams(memory: Tensors, rows: Tensor | None, part: Tensors) -> Tensors:
    """The streams `rows` (None: all) as they are in `part`, the others as they are in `memory`."""
    if rows is None:
        return part
    return {n: part[n] if n.startswith(SHARED) else v.index_copy(0, rows, part[n]) for n, v in memory.items()}


class Rule(ABC):
    """A rule keeps `P_t ≈ dh_t/dθ` in some form.

    The gradient of the loss at step t is `∂L_t/∂θ + q P_{t-1}` with `q = dL_t/dh_{t-1}`: the first term is the newest
    step, which `Online` computes exactly for every rule, and `credit` supplies the second. `look` may then change the
    form, and `advance` makes `P_t = J P_{t-1} + F`, or what the rule has in its place.
    """

    @abstractmethod
    def start(self, transition: Transition) -> Tensors:
        """The memory before the first step."""

    @abstractmethod
    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        """`Σ_b q_b P_b`, for each parameter flat or in its shape. Parameters without credit may be missing."""

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        """The memory once the error of the step is known, for instance in a new basis. The default changes nothing.

        `memory` is that of all streams, so that a new basis reaches those that are skipped in this step, too; `error`
        and `transition` are those of the others. `error` is None without a loss.
        """
        return memory

    def look_late(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        """The memory once an error is known that arrived late. `transition` is its own step, with the weights of then.

        The default is `look`.
        """
        return self.look(memory, error, transition)

    @abstractmethod
    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        """The memory after the step."""


# --- a dense influence: "P/<parameter>" has the shape (batch, rank, size of the parameter) ----------------------------


def zero_influence(transition: Transition, rank: int) -> Tensors:
    """An influence of zero."""
    h = transition.h
    return {f"P/{name}": h.new_zeros(len(h), rank, p.numel()) for name, p in transition.parameters.items()}


def influence(memory: Tensors) -> Tensors:
    """The tensors of the influence in a memory, by their names there."""
    return {name: P for name, P in memory.items() if name.startswith("P/")}


def credit_through(c: Tensor, memory: Tensors) -> Tensors:
    """`Σ_b c_b P_b` for each parameter, flat: c (batch, rank)."""
    return {name[2:]: (c.reshape(1, -1) @ P.flatten(0, 1))[0] for name, P in influence(memory).items()}


def advanced(A: Tensor, memory: Tensors, F: Tensors) -> Tensors:
    """The influence `A P + F`: A (batch, rank, rank). `F` is overwritten, so that there are never three of this size.

    Autograd may return one tensor for two parameters, or for a parameter and the state: these are copied first.
    """
    uses = Counter(value.untyped_storage().data_ptr() for value in (A, *F.values()))
    alone = {name: new if uses[new.untyped_storage().data_ptr()] == 1 else new.clone() for name, new in F.items()}
    return {f"P/{name}": new.contiguous().baddbmm_(A, memory[f"P/{name}"]) for name, new in alone.items()}
