"""The methods that `advise` tries, in the order in which it recommends them.

The exact gradient comes first, then what trained best in the measurements: students on deep networks (`docs/deep.md`),
feedback in pieces with rare lessons on shallow ones (`docs/real.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gradguess.baselines import Checkpointed, MeZO
from gradguess.guesses import ActivationPerturbation, Guess, WPerp
from gradguess.methods import Feedback, LocalGuess, Method, Students
from gradguess.model.site import Sites

BACKPROP, CHECKPOINTED = "Backpropagation", "Backpropagation, checkpoints"


@dataclass(frozen=True)
class Candidate:
    """One way to get gradients.

    Attributes:
        name: in the table.
        method: None is `loss.backward()`.
        code: the same as an expression.
        in_pieces: it is for a model in pieces (`sites=n`).
        top: what a guess does at the model's output.
    """

    name: str
    method: Guess | Method | None
    code: str
    in_pieces: bool = False
    top: Literal["guess", "exact"] = "guess"

    @property
    def every(self) -> int:
        """The number of steps after which the work repeats."""
        return self.method.every if isinstance(self.method, Feedback) else 1

    @property
    def refresh(self) -> int:
        """The number of such rounds between two searches; 0 where nothing is searched."""
        guess = self.method.guess if isinstance(self.method, Feedback) else self.method
        return guess.refresh if isinstance(guess, Guess) and guess.searches else 0

    def line(self, sites: Sites, pieces: int, inputs: Any = None) -> str:
        """The line of code to use."""
        if self.method is None:
            stars = "**" if isinstance(inputs, Mapping) else "*" if isinstance(inputs, tuple) else ""
            return f"loss_fn(model({stars}inputs), targets).mean().backward()"
        where = f", sites={pieces}" if self.in_pieces else "" if sites == "auto" else f", sites={sites!r}"
        top = "" if self.top == "guess" else f', top="{self.top}"'
        return f"forward = gg.ForwardGradient(model, {self.code}{where}{top})"


SHALLOW = 8  # layers with parameters: up to so many, feedback in pieces trained as well as backpropagation
CANDIDATES = (  # in the order of a shallow model
    Candidate(BACKPROP, None, "loss.backward()"),
    Candidate(CHECKPOINTED, Checkpointed(), "gg.baselines.Checkpointed()", in_pieces=True),
    Candidate(
        "Feedback, chained, rare lessons, in pieces",
        Feedback(WPerp(), every=4, fraction=0.25),
        "gg.Feedback(gg.WPerp(), every=4, fraction=0.25)",
        in_pieces=True,
    ),
    Candidate("Students", Students(), "gg.Students()", in_pieces=True),
    Candidate("Feedback, chained", Feedback(WPerp()), "gg.Feedback(gg.WPerp())"),
    Candidate("Feedback, direct", Feedback(WPerp(), form="direct"), 'gg.Feedback(gg.WPerp(), form="direct")'),
    Candidate(
        "Feedback, direct, rare lessons",
        Feedback(WPerp(), form="direct", every=4, fraction=0.25),
        'gg.Feedback(gg.WPerp(), form="direct", every=4, fraction=0.25)',
    ),
    Candidate("Local guess", LocalGuess(), "gg.LocalGuess()", in_pieces=True),
    Candidate("W⊥, exact top", WPerp(), "gg.WPerp()", top="exact"),
    Candidate("W⊥", WPerp(), "gg.WPerp()"),
    Candidate("Activation perturbation", ActivationPerturbation(), "gg.ActivationPerturbation()"),
    Candidate("MeZO", MeZO(), "gg.baselines.MeZO()"),
)


def candidates_for(model: nn.Module) -> tuple[Candidate, ...]:
    """All of them. Of a deep model students come before feedback, of a shallow one after it."""
    layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    back, checkpoints, rare, students, *others = CANDIDATES
    local = (rare, students) if len(layers) <= SHALLOW else (students, rare)
    return back, checkpoints, *local, *others
