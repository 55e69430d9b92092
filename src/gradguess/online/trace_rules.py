"""Rules that keep traces: SnAp, e-prop, RFLO. They differ in how far a trace reaches, and in how it is carried on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError, check_count
from gradguess.online import traces
from gradguess.online.rule import Error, Rule, Tensors, Transition


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

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return traces.credit(memory, error.q)

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

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return traces.credit(memory, error.q)

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
