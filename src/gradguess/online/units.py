"""Traces: the influence of each parameter on the few components of the state that it moves, and on no other.

A row of a parameter (its first dimension) moves some components of the state within one step: in an `RNNCell` row i
moves unit i, in an `LSTMCell` it moves `h_i` and `c_i`. A trace keeps these components alone. Components are coloured
so that no row moves two of the same colour; one vjp for each colour then gives all of `F` that is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradguess.online.rule import Kept, Tensors, Transition

PROBES = 4  # streams from which the pattern is read
CHUNK = 32  # cotangents at a time


@dataclass(frozen=True)
class Traces:
    """The pattern.

    Attributes:
        colours: (colours, n): which components have the colour.
        slots: for each parameter (rows, colours): the component of this colour that the row moves, or -1.
    """

    colours: Tensor
    slots: Mapping[str, Tensor]

    @staticmethod
    def of(kept: Kept) -> Traces:
        slots = {name.removeprefix("slots/"): value for name, value in kept.shared.items() if name != "colours"}
        return Traces(kept.shared["colours"], slots)

    @staticmethod
    def find(transition: Transition, order: int = 1, closed: bool = False, cut: bool = False) -> Traces:
        """Read the pattern from a step at random states.

        Args:
            order: number of steps in which a row reaches what is kept.
            closed: any number of steps.
            cut: of what a unit does by itself, without products with weights.
        """
        reached, J = _pattern(_probe(transition), cut)
        names, sizes = list(reached), [reach.shape[1] for reach in reached.values()]
        R = torch.cat(list(reached.values()), 1)
        for _ in range(transition.width if closed else order - 1):
            more = R | ((J.float() @ R.float()) > 0)
            if torch.equal(more, R):
                break
            R = more
        colour = _coloured((R.float() @ R.float().T) > 0)
        count = int(colour.max()) + 1
        colours = torch.nn.functional.one_hot(colour, count).T.to(transition.h)
        slots = torch.full((R.shape[1], count), -1)
        component, row = R.nonzero(as_tuple=True)
        slots[row, colour[component]] = component
        return Traces(colours, dict(zip(names, slots.to(transition.h.device).split(sizes), strict=True)))

    def start(self, transition: Transition) -> Kept:
        h, parameters = transition.h, transition.parameters
        rows = {
            f"T/{name}": h.new_zeros(h.shape[0], *slots.shape, parameters[name].numel() // slots.shape[0])
            for name, slots in self.slots.items()
        }
        shared = {f"slots/{name}": slots for name, slots in self.slots.items()}
        return Kept(rows, {"colours": self.colours, **shared})

    def credit(self, kept: Kept, q: Tensor) -> Tensors:
        """`Σ_b q_b P_b` with what is kept of `P`."""
        return {
            name: torch.einsum("brk,brkc->rc", _gathered(q, slots), kept.rows[f"T/{name}"]).flatten()
            for name, slots in self.slots.items()
        }

    def advance(self, kept: Kept, transition: Transition, J: Tensor | str | float) -> Kept:
        """`T ← J T + F`, in the pattern.

        Args:
            J: the Jacobian (batch, n, n); "own": no unit sees another, so that the vjps of the colours hold all of it;
                "cut": the same of what a unit does by itself; a number: `J T` is this number times `T`.
        """
        of_colours, F = transition.vjps(self.colours, cut=J == "cut" if isinstance(J, str) else False)
        rows = {}
        for name, slots in self.slots.items():
            T = kept.rows[f"T/{name}"]
            new = F[name].unflatten(2, (slots.shape[0], -1)).transpose(1, 2)  # (batch, rows, colours, columns)
            if isinstance(J, float):
                rows[f"T/{name}"] = torch.add(new, T, alpha=J)
                continue
            if isinstance(J, str):
                block = _gathered(of_colours, slots).transpose(1, 2)
            else:
                row = J[:, slots.clamp_min(0)]  # (batch, rows, colours, n)
                block = row.gather(3, slots.clamp_min(0)[None, :, None].expand(*row.shape[:3], -1))
            there = (slots >= 0).to(T)
            block = block * there[:, :, None] * there[:, None, :]  # (batch, rows, colours, colours)
            rows[f"T/{name}"] = block * T + new if slots.shape[1] == 1 else block @ T + new
        return Kept(rows, kept.shared)


def _gathered(values: Tensor, slots: Tensor) -> Tensor:
    """The entries at the slots, zero where there is none: (..., n) -> (..., rows, colours)."""
    return values[..., slots.clamp_min(0)] * (slots >= 0)


def _probe(transition: Transition) -> Transition:
    """The same step at random states, and inputs that are nowhere zero, so that no influence hides."""
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Tensor) -> Tensor:
        noise = torch.randn(leaf[:PROBES].shape, generator=generator)
        return leaf[:PROBES] + 0.1 * noise.to(leaf) if leaf.is_floating_point() else leaf[:PROBES]

    h = torch.randn(transition.h[:PROBES].shape, generator=generator).to(transition.h)
    others = tuple(leaf[:PROBES] for leaf in transition.others)
    return dataclasses.replace(transition, h=h, others=others, x=tree_map_only(Tensor, moved, transition.x))


def _pattern(transition: Transition, cut: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Which components each row of each parameter moves, (n, rows), and which components move which, (n, n)."""
    every = torch.eye(transition.width, dtype=transition.h.dtype, device=transition.h.device)
    reached: dict[str, list[Tensor]] = {name: [] for name in transition.parameters}
    J = []
    for c in every.split(CHUNK):
        of_state, F = transition.vjps(c, cut)
        J.append((of_state != 0).any(0).cpu())
        for name, p in transition.parameters.items():
            rows = p.shape[0] if p.dim() else 1
            reached[name].append((F[name] != 0).any(0).unflatten(1, (rows, -1)).any(2).cpu())
    return {name: torch.cat(parts) for name, parts in reached.items()}, torch.cat(J)


def _coloured(conflict: Tensor) -> Tensor:
    """A colour for each component, so that two that are in conflict differ (greedy)."""
    n = conflict.shape[0]
    colour = torch.full((n,), -1)
    for i in range(n):
        taken = set(colour[:i][conflict[i, :i]].tolist())
        colour[i] = next(c for c in range(n) if c not in taken)
    return colour
