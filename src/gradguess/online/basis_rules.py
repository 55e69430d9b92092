"""The rules with a basis: W⊥ through time, completed by SnAp beyond the basis, and in blocks of steps; and the bases.

A basis is a function, named in `BASES`, that chooses k directions of the state. It takes the Jacobians of a step
(batch, n, n), the second moment `S` of the errors `q` at the state (n, n), and k; it returns k orthonormal columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradguess.errors import InputError, NonFiniteError, check_choice, check_count
from gradguess.linalg import sure_eigh
from gradguess.online import traces
from gradguess.online.rules import TBPTT, Error, Rule, SnAp, Tensors, Transition, where
from gradguess.online.traces import advanced, credit_through, influence, zero_influence

DECAY = 0.99  # of the second moment of the errors, per step
LAGS = 40  # of the Gramian: its sum diverges where the spectral radius reaches one
FAR = 128  # lags, where each term is scaled

Basis = Callable[[Tensor, Tensor, int], Tensor]


def wperp(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the recurrence passes on: top right singular vectors of the mean Jacobian."""
    mean = J.mean(0)
    return _top(mean.T @ mean, k)


def observable(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses see: top eigenvectors of the observability Gramian `Σ_j (J̄ᵀ)^j S J̄^j`.

    Near errors outweigh far ones, as each step back shrinks them.
    """
    mean, S = J.mean(0), _scaled(S)
    Q, weight = S, torch.ones_like(S[0, 0])
    for _ in range(LAGS):
        Q = weight * S + mean.T @ Q @ mean
        size = Q.trace().clamp_min(1)  # only directions count: nothing may overflow
        Q, weight = Q / size, weight / size
    return _top(Q, k)


def lagged(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses see, whatever the lag: the Gramian's terms, each of trace one, weighing `1 / lag`.

    An error that looks far back is weak, not unimportant: it may be the only one that can be explained. With these
    weights the lags from 1 to 2, from 2 to 4, from 4 to 8 and so on count alike.
    """
    weighed = (term / lag for lag, term in enumerate(_terms(J, S, FAR), 1))
    return _top(sum(weighed, start=torch.zeros_like(S)), k)


def krylov(J: Tensor, S: Tensor, k: int) -> Tensor:
    """The directions that the losses of the next k steps see: the Gramian's first k terms, each of trace one.

    With one output each term is one direction, and the k of them span all that these losses see.
    """
    return _top(sum(_terms(J, S, k), start=torch.zeros_like(S)), k)


BASES: Mapping[str, Basis | None] = {
    "wperp": wperp,
    "observable": observable,
    "lagged": lagged,
    "krylov": krylov,
    "random": None,  # the directions of the start stay: the control
}


def _terms(J: Tensor, S: Tensor, count: int) -> Iterator[Tensor]:
    """`(J̄ᵀ)^j S J̄^j` for j = 0, 1, ..., each divided by its trace."""
    mean, term = J.mean(0), _scaled(S)
    for _ in range(count):
        yield term
        term = _scaled(mean.T @ term @ mean)


def _top(Q: Tensor, k: int) -> Tensor:
    """The top-k eigenvectors of a symmetric matrix."""
    return sure_eigh(_scaled((Q + Q.T) / 2))[1].flip(1)[:, :k].contiguous()


def _scaled(Q: Tensor) -> Tensor:
    """The matrix divided by its trace; zero stays zero."""
    trace = Q.trace()
    return Q / torch.where(trace > 0, trace, 1)


@dataclass(frozen=True)
class WPerp(Rule):
    """`P̃_t = (Vᵀ J_t V) P̃_{t-1} + Vᵀ F_t` with V (n × k) orthonormal: of `P_t` only `Vᵀ P_t` is memory.

    The past gets the credit `(q V) P̃_{t-1}`; the newest step is exact. A new basis `V'` takes over `(V'ᵀ V) P̃`.
    With k = n this is RTRL, with k = 0 it would be one-step credit. V starts at random.

    Bias: what leaves the span of V. It is zero where V spans the errors `dL_s/dh_t` of all later losses at all states
    that they go back to (`VVᵀ` then changes nothing).
    Memory: k p for each stream, and n (k + n) once. Time: k² p for each stream and step, and k vjps of the cell; every
    `refresh` steps n vjps and an eigenvalue problem of size n.

    Reference: the paper's W⊥, along time; the Gramian and its truncation: Moore 1981.

    Args:
        k: number of directions; n at most.
        basis: "lagged" what the losses see, near and far; "krylov" what those of the next k steps see; "observable"
            what they see, weighed by its strength; "wperp" what the recurrence passes on; "random" a control.
        refresh: steps between two searches for the basis.
    """

    k: int = 16
    basis: str = "lagged"
    refresh: int = 50

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_count("refresh", self.refresh)
        check_choice("basis", self.basis, tuple(BASES))

    def start(self, transition: Transition) -> Tensors:
        n, V, source = transition.width, transition.identity, transition.generator
        S = torch.zeros_like(V, dtype=torch.promote_types(V.dtype, torch.float32))
        if self.k < n:
            noise = torch.randn(n, self.k, dtype=S.dtype, generator=source, device=source.device)
            V = torch.linalg.qr(noise)[0].to(V)
        return {**zero_influence(transition, V.shape[1]), "shared/V": V, "shared/S": S}

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        return credit_through(error.q @ memory["shared/V"], memory)

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        """The memory with this error in `S`, and from time to time in a new basis."""
        memory = self.with_error(memory, error)
        V, S, search = memory["shared/V"], memory["shared/S"], BASES[self.basis]
        if search is None or transition.count % self.refresh or V.shape[1] == V.shape[0]:
            return memory
        J = transition.jacobian().to(S)
        if not bool(torch.isfinite(J).all()):
            raise NonFiniteError(
                f"The Jacobian of the state at step {transition.count} is NaN or infinite. Nothing was changed. Look "
                "for a root, a logarithm or a quotient at zero in the model."
            )
        seen = S if bool(S.any()) else transition.identity.to(S)  # no error yet: any may come
        new = search(J, seen, V.shape[1]).to(V)
        turn = new.T @ V
        return memory | {name: turn @ P for name, P in influence(memory).items()} | {"shared/V": new}

    def with_error(self, memory: Tensors, error: Error | None) -> Tensors:
        """The memory with this error in `S`, the second moment of the errors."""
        if error is None:
            return memory
        S = memory["shared/S"]
        q = error.q.to(S)
        return memory | {"shared/S": DECAY * S + q.T @ q}

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        CJ, CF = transition.vjps(V.T)
        return memory | advanced(CJ @ V, memory, CF)


@dataclass(frozen=True)
class Completed(Rule):
    """`P_t ≈ V P̃_t + (I - VVᵀ) D_t`: W⊥'s influence within its basis, and SnAp's sparse D beyond it.

    `P̃_t = Vᵀ (J_t P_{t-1} + F_t)` with this P, so that what was outside of the basis and turns into it is not lost,
    neither in a step nor where the basis changes. With an exact D this is RTRL, whatever V is.

    Bias: what leaves the span of V, where D is wrong: outside of SnAp's pattern, and within it for credit that comes
    back through other units. D grows without bound where a unit by itself does, even if all of them together do not.
    Memory: that of both rules. Time: that of both, and k p for each stream.

    Reference: this library.

    Args:
        inner: the rule with the basis.
        rest: what stands for the influence beyond it.
    """

    inner: WPerp = field(default_factory=WPerp)
    rest: SnAp = field(default_factory=SnAp)

    def __post_init__(self) -> None:
        if not (isinstance(self.inner, WPerp) and isinstance(self.rest, SnAp)):
            found = f"{type(self.inner).__name__} and {type(self.rest).__name__}"
            raise InputError(f"Completed: expected a WPerp and a SnAp, as in Completed(WPerp(k=16)), found {found}.")

    def start(self, transition: Transition) -> Tensors:
        return self.inner.start(transition) | self.rest.start(transition)

    def credit(self, memory: Tensors, error: Error, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        within = error.q @ V
        beyond = traces.credit(memory, error.q - within @ V.T)
        return {name: inside + beyond[name] for name, inside in credit_through(within, memory).items()}

    def look(self, memory: Tensors, error: Error | None, transition: Transition) -> Tensors:
        V, found = memory["shared/V"], self.inner.look(memory, error, transition)
        new = found["shared/V"]
        if new is not V:
            gained = traces.through(memory, (new.T - new.T @ V @ V.T)[None])  # from beyond the old basis
            found |= {f"P/{name}": found[f"P/{name}"] + more for name, more in gained.items()}
        return found

    def advance(self, memory: Tensors, transition: Transition) -> Tensors:
        V = memory["shared/V"]
        CJ, CF = transition.vjps(V.T)
        within = CJ @ V
        gained = traces.through(memory, CJ - within @ V.T)
        F = {name: more.add_(CF.pop(name)) for name, more in gained.items()}
        return memory | self.rest.advance(memory, transition) | advanced(within, memory, F)


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
