"""UORO: an unbiased influence of rank one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.online.rule import Error, Rule, Tensors, Transition


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
