"""`Rule`: how the influence of the past on the state is kept, and how it becomes a gradient; and the rules without a
basis: exact, of rank one, sparse, truncated, and one step of credit.

A rule's memory is a mapping from names to tensors. Those whose names start with "shared/" are for all streams together,
such as a basis; all others have one row per stream, and zeros in a row are a stream that starts. A step makes a new
memory and never writes to the old one.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.errors import InputError, check_count
from gradguess.online import traces
from gradguess.online.traces import advanced, credit_through, zero_influence
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

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        """`Σ_b q_b P_b`, for each parameter flat or in its shape. Parameters without credit may be missing.

        The default takes the memory for `P` itself, dense or as traces.
        """
        return traces.credit(memory, error.q) if "shared/colours" in memory else credit_through(error.q, memory)

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


@dataclass(frozen=True)
class RTRL(Rule):
    """Exact: `P_t = J_t P_{t-1} + F_t`, all n × p numbers of it, for each stream.

    Bias: none while the weights stay. When they change, what is kept belongs to the weights of the past steps.
    Memory: n p for each stream. Time: n² p for each stream and step.
    A model that says `elementwise = True` (no unit of the state sees another, as in `LRU`) needs far less: the few
    numbers by which each parameter moves its own unit. Memory and time: about 2 p. It is exact all the same.

    Reference: Williams and Zipser 1989; element-wise: Mozer 1989, Zucchet et al. 2023.
    """

    def start(self, transition: Transition) -> Tensors:
        if getattr(transition.model, "elementwise", False):
            return traces.start(transition)
        return zero_influence(transition, transition.width)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        if "shared/colours" in memory:
            return traces.advance(memory, transition)
        J, F = transition.vjps(transition.identity)
        return advanced(J, memory, F)


@dataclass(frozen=True)
class SnAp(Rule):
    """`P_t = M ∘ (J_t P_{t-1} + F_t)`: M holds what a row of a parameter can reach within `order` steps.

    With order 1 a row of an `RNNCell` or a `GRUCell` keeps its influence on its own unit; credit that passes through
    another unit and comes back is lost. With order 2 and a dense recurrence M holds everything: that is RTRL.
    The pattern is read from the model itself, at the first step. In a stack, and for an embedding before the cell, a
    row reaches all units above it within one step, and keeps as much.
    The newest step is exact, and `q P_{t-1}` takes the hop from it to the one before without a mask. (The
    paper masks that hop, too.)

    Bias: all influence outside of M, from two steps back on. Memory: p for each stream (`RNNCell`), 2 p (`LSTMCell`).
    Time: p, and n vjps of the cell for the diagonal of J.

    Reference: Menick et al. 2021.

    Args:
        order: within how many steps a row must reach what M holds.
    """

    order: int = 1

    def __post_init__(self) -> None:
        check_count("order", self.order)

    def start(self, transition: Transition) -> Tensors:
        return traces.start(transition, self.order)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        return traces.advance(memory, transition, transition.jacobian())


@dataclass(frozen=True)
class EProp(Rule):
    """`T_t = D_t T_{t-1} + F_t` with `D_t` the part of the Jacobian that passes through no product with weights.

    That is the leak of a leaky or spiking unit, the gate of a `GRUCell`, the forget gate of an `LSTMCell`. `F_t` is cut
    in the same way: in a stack a weight gets no trace on the cells above its own.
    The newest step is exact, and the learning signal for `T_{t-1}` is the exact error at the state before the step. So
    credit passes through recurrent weights once. (The paper takes the error after the step, so that it never does, and
    also offers random feedback in its place.) In a plain `RNNCell` `D` is zero, and this is `TBPTT(2)`.

    Bias: credit that passes through products with weights more than once, between cells of a stack included. Memory and
    time: p for each stream, 2 p for an `LSTMCell`. A fused cell hides its products: put it into `Recurrent`. A sum
    that is written as additions, term by term, hides one, too: use `sum`, `matmul` or `einsum`.

    Reference: Bellec et al. 2020.
    """

    def start(self, transition: Transition) -> Tensors:
        return traces.start(transition, cut=True)

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        return traces.advance(memory, transition, cut=True)


@dataclass(frozen=True)
class RFLO(Rule):
    """`T_t = decay · T_{t-1} + F_t`, and the error reaches the units through a fixed random matrix.

    The trace is that of a leaky unit with `decay = 1 - 1/τ` whose recurrent weights are taken as zero: choose `decay`
    as the cell leaks. As with `EProp`, `F_t` is that of a weight on its own cell. The newest step is exact, through the
    readout itself. All steps before it get the credit `decay · e B T_{t-1}` with `e = dL/d output` and
    `B ~ N(0, 1/n)`, drawn once. (The paper takes `B` for the newest step, too.)

    Bias: all credit through recurrent weights; `B` is not the readout. Memory and time: p for each stream.

    Reference: Murray 2019.

    Args:
        decay: of the traces at each step, at least 0 and below 1.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"decay: expected a number from 0 to below 1, found {self.decay!r}.")

    def start(self, transition: Transition) -> Tensors:
        output, generator = transition.output, transition.generator
        if not isinstance(output, Tensor) or output.shape[:1] != (transition.batch,):
            raise InputError(
                "RFLO: expected an output that is one tensor with a row per stream: its feedback starts there."
            )
        size = output[0].numel(), transition.width
        B = torch.randn(size, generator=generator, device=generator.device).to(transition.h) / transition.width**0.5
        return traces.start(transition, 1, cut=True) | {"shared/B": B}

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        if error.e is None:  # the output depends on no parameter in this step
            return {}
        return traces.credit(memory, self.decay * (error.e @ memory["shared/B"]))

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        return traces.advance(memory, transition, float(self.decay), cut=True)


@dataclass(frozen=True)
class UORO(Rule):
    """`P_t ≈ s_t θ̃_tᵀ` with `s_t = ρ₀ J s_{t-1} + ρ₁ ν` and `θ̃_t = θ̃_{t-1}/ρ₀ + νᵀF/ρ₁`, ν random signs.

    The ρ make both factors equally long, which keeps the variance low.

    Bias: none. Variance: grows with the number of units; it is what hinders learning.
    Memory: n + p for each stream. Time: a jvp and a vjp of the cell.

    Reference: Tallec and Ollivier 2018.
    """

    def start(self, transition: Transition) -> Tensors:
        h = transition.h
        θ = {f"θ/{name}": h.new_zeros(len(h), p.numel()) for name, p in transition.parameters.items()}
        return {"s": torch.zeros_like(h), **θ}

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        c = (error.q * memory["s"]).sum(1)
        return {name: c @ memory[f"θ/{name}"] for name in transition.parameters}

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        h = transition.h
        signs = torch.randint(2, h.shape, generator=transition.generator, device=transition.generator.device)
        ν = signs.to(h) * 2 - 1
        s = transition.jvp(memory["s"])
        _, F = transition.vjps(ν[:, None])
        old = {name: memory[f"θ/{name}"] for name in transition.parameters}
        new = {name: value[:, 0] for name, value in F.items()}
        ρ0, ρ1 = _ratio(_length(old), s.norm(dim=1)), _ratio(_length(new), ν.norm(dim=1))
        θ = {f"θ/{name}": old[name] / ρ0[:, None] + new[name] / ρ1[:, None] for name in old}
        return {"s": ρ0[:, None] * s + ρ1[:, None] * ν} | θ


def _length(parts: Tensors) -> Tensor:
    """The length of each stream's vector over all parameters."""
    return torch.stack([part.norm(dim=1) for part in parts.values()]).norm(dim=0)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """The factor that makes two vectors equally long; 1 where one of them is zero."""
    there = (above > 0) & (below > 0)
    return torch.where(there, above / torch.where(there, below, 1), 1).sqrt()


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


@dataclass(frozen=True)
class OneStep(Rule):
    """`P = 0`: the state before the step is taken as an input.

    Bias: all credit beyond the step itself. Memory: none. Time: that of the step. The same as `TBPTT(1)`.

    Reference: Elman 1990.
    """

    def start(self, transition: Transition) -> Tensors:
        return {}

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        return memory
