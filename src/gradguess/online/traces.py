"""The two forms of influence: dense, or traces of the few components of the state that each parameter moves.

A row of a parameter (its first dimension) moves some components of the state within one step: in an `RNNCell` row i
moves unit i, in an `LSTMCell` it moves `h_i` and `c_i`. A trace `T` keeps these components alone, and `slots` (rows,
slots) lists them, in order, then -1. Components are coloured so that no row moves two of the same colour; one vjp for
each colour then gives all of `F` that is kept. `colours` (colours, n) says which components have the colour.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradguess.online.transition import Tensors, Transition

DRAWS = 8  # of random states, at most, from which the pattern is read
SIZES = (1.0, 1.0, 30.0, 300.0)  # of the states in each draw: large ones turn on what is off
CHUNK = 32  # cotangents at a time
SLOTS = "shared/slots/"


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


# --- traces ----------------------------------------------------------------------------------------------------------


def start(transition: Transition, steps: int | None = None, cut: bool = False) -> Tensors:
    """The pattern, read from a step at random states, and traces of zero.

    Args:
        transition: the first step.
        steps: within how many steps a row reaches what is kept; None: any number.
        cut: keep what a unit does by itself, without products with weights.
    """
    reached, J = _pattern(transition, cut)
    R = torch.cat(list(reached.values()), 1)
    for _ in range((transition.width + 1 if steps is None else steps) - 1):
        further = R | ((J.float() @ R.float()) > 0)
        if torch.equal(further, R):
            break
        R = further
    colour = _coloured((R.float() @ R.float().T) > 0)
    memory = {"shared/colours": torch.nn.functional.one_hot(colour).T.to(transition.h)}
    for name, reach in zip(reached, R.split([reach.shape[1] for reach in reached.values()], 1), strict=True):
        slots = memory[SLOTS + name] = _packed(reach).to(transition.h.device)
        columns = transition.parameters[name].numel() // len(slots)
        memory[f"T/{name}"] = transition.h.new_zeros(transition.batch, *slots.shape, columns)
    return memory


def slots_of(memory: Tensors) -> Tensors:
    """The slots of each parameter."""
    return {name.removeprefix(SLOTS): v for name, v in memory.items() if name.startswith(SLOTS)}


def credit(memory: Tensors, q: Tensor) -> Tensors:
    """`Σ_b q_b P_b` for each parameter, flat."""
    return {
        name: torch.einsum("brk,brkc->rc", _at(slots, q), memory[f"T/{name}"]).flatten()
        for name, slots in slots_of(memory).items()
    }


def through(memory: Tensors, C: Tensor) -> Tensors:
    """`C_b P_b` for each parameter, (batch, m, size): C (batch, m, n), or (1, m, n) for all streams."""
    return {
        name: torch.einsum("bmrk,brkc->bmrc", _at(slots, C), memory[f"T/{name}"]).flatten(2)
        for name, slots in slots_of(memory).items()
    }


def advance(memory: Tensors, transition: Transition, J: Tensor | float | None = None, cut: bool = False) -> Tensors:
    """`T ← J T + F`, in the pattern.

    Args:
        memory: the pattern, and the traces before the step.
        transition: the step.
        J: the Jacobian (batch, n, n); a number: `J T` is this number times `T`; None: rows reach what is kept in any
            number of steps, so that the vjps of the colours hold all of J that is needed.
        cut: keep what a unit does by itself, without products with weights.
    """
    of_state, F = transition.vjps(memory["shared/colours"], cut)
    colour = memory["shared/colours"].argmax(0)
    memory = dict(memory)
    for name, slots in slots_of(memory).items():
        T, component, taken = memory[f"T/{name}"], slots.clamp_min(0), slots >= 0
        row = torch.arange(slots.shape[0], device=slots.device)[:, None]
        new = F.pop(name).unflatten(2, (slots.shape[0], -1))[:, colour[component], row]  # (batch, rows, slots, columns)
        if isinstance(J, float):
            memory[f"T/{name}"] = torch.add(new, T, alpha=J)
            continue
        to, source = (colour[component], of_state) if J is None else (component, J)
        block = source[:, to[:, :, None], component[:, None, :]] * (taken[:, :, None] & taken[:, None, :])
        memory[f"T/{name}"] = block * T + new if slots.shape[1] == 1 else block @ T + new
    return memory


def _at(slots: Tensor, C: Tensor) -> Tensor:
    """The entries of C (..., n) for the components in the slots, and zero for empty slots: (..., rows, slots)."""
    return C[..., slots.clamp_min(0)] * (slots >= 0)


def _pattern(transition: Transition, cut: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Which components each row of each parameter moves, (n, rows), and which components move which, (n, n).

    A derivative that is zero at one state (a ReLU that is off, a weight that starts at zero) may not be so at another:
    states are drawn, and every second time weights are moved, until each row moves something. A row that never does
    while others of its parameter do, such as that of a word that was not there, is taken to move everything.
    """
    generator, n = torch.Generator().manual_seed(0), transition.width
    sizes = {name: p.shape[0] if p.dim() else 1 for name, p in transition.parameters.items()}
    reached = {name: torch.zeros(n, rows, dtype=torch.bool) for name, rows in sizes.items()}
    J = torch.zeros(n, n, dtype=torch.bool)
    for draw in range(DRAWS):
        probe = _probe(transition, generator, moved=draw % 2 == 1)
        for first, c in enumerate(transition.identity.split(CHUNK)):
            part = slice(first * CHUNK, first * CHUNK + len(c))
            of_state, F = probe.vjps(c, cut)
            J[part] |= _anywhere(of_state)
            for name, rows in sizes.items():
                reached[name][part] |= _anywhere(F.pop(name)).unflatten(1, (rows, -1)).any(2)
        if draw and all(bool(reach.any(0).all()) for reach in reached.values()):
            break
    return {name: torch.where(reach.any(0), reach, reach.any()) for name, reach in reached.items()}, J


def _anywhere(values: Tensor) -> Tensor:
    """Where any stream has a number that is not zero: (streams, ...) -> (...). NaN counts as zero."""
    return (torch.nan_to_num(values) != 0).any(0).cpu()


def _probe(transition: Transition, generator: torch.Generator, moved: bool) -> Transition:
    """The same step at random states, and at inputs and weights that are nowhere zero."""
    rows = torch.arange(len(SIZES), device=transition.h.device) % transition.batch

    def shaken(leaf: Tensor, size: Tensor | float) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return torch.nan_to_num(leaf) + (size * torch.randn(leaf.shape, generator=generator)).to(leaf)

    def sizes(leaf: Tensor) -> Tensor:
        return torch.tensor(SIZES).view(-1, *[1] * (leaf.dim() - 1))

    h = shaken(torch.zeros_like(transition.h[rows]), sizes(transition.h))
    parameters = {name: shaken(p, 0.1 if moved else 0.0) for name, p in transition.parameters.items()}
    x = tree_map_only(Tensor, lambda leaf: shaken(leaf[rows], 0.1 * sizes(leaf)), transition.x)
    state = {name: leaf[rows] for name, leaf in transition.state.items()} | {"h": h}
    return dataclasses.replace(transition, weights={**transition.weights, **parameters}, state=state, x=x)


def _packed(reach: Tensor) -> Tensor:
    """The components that each row reaches, in order, then -1: (n, rows) -> (rows, slots)."""
    most = max(1, int(reach.sum(0).max()))
    there, component = reach.T.long().sort(dim=1, descending=True, stable=True)
    return torch.where(there[:, :most] > 0, component[:, :most], -1)


def _coloured(conflict: Tensor) -> Tensor:
    """A colour for each component, so that two that are in conflict differ (greedy)."""
    n = conflict.shape[0]
    colour = torch.full((n,), -1)
    for i in range(n):
        taken = set(colour[:i][conflict[i, :i]].tolist())
        colour[i] = next(c for c in range(n) if c not in taken)
    return colour
