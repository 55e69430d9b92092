"""What is tried, and what comes of it: the methods, numbers for each as objects, as JSON and as a table, and a
recommendation.

The methods stand in the order in which they are recommended. The exact gradient comes first, then what trained best in
the measurements: students on deep networks (`docs/deep.md`), feedback in pieces with rare lessons on shallow ones
(`docs/real.md`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from gradguess.baselines import Checkpointed, MeZO
from gradguess.diagnose.report import aligned, shown
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


COLUMNS = {
    "time": "time / backprop",
    "over_checkpoints": "/ checkpoints",
    "memory": "memory / backprop",
    "cosine": "cosine",
    "lowest_cosine": "lowest",
}


@dataclass(frozen=True)
class Row:
    """One method on this model and this machine. What could not be measured is None.

    Attributes:
        method: its name.
        code: the line of code to use.
        problem: why it does not work here; None where it works.
        time: of a step, over that of `loss.backward()`; what a search takes is spread over the steps between two.
        over_checkpoints: the same over backpropagation with checkpoints.
        memory: the peak of a step, over that of `loss.backward()`.
        memory_mb: the peak itself: all that a step allocates, gradients included, and what the method keeps from step
            to step. Weights, the batch and an optimiser's state are not counted.
        cosine: between the gradient of one step and the true one, over all parameters.
        lowest_cosine: the same over the parameters of the lowest site.
    """

    method: str
    code: str
    problem: str | None = None
    time: float | None = None
    over_checkpoints: float | None = None
    memory: float | None = None
    memory_mb: float | None = None
    cosine: float | None = None
    lowest_cosine: float | None = None

    @property
    def works(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Advice:
    """What `gg.advise` found. Printed, it is a table and the recommendation.

    Attributes:
        rows: one for each method, in the order in which they are recommended.
        method: the name of the recommended method; None where nothing works or fits.
        recommendation: one or two sentences.
        code: the line of code to use; empty where nothing is recommended. A `forward` is made once, and called with
            `loss = forward(loss_fn, inputs, targets)` where `loss.backward()` stood.
        seconds: how long the measurement took.
    """

    rows: tuple[Row, ...]
    method: str | None
    recommendation: str
    code: str
    seconds: float

    def __getitem__(self, method: str) -> Row:
        return {row.method: row for row in self.rows}[method]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None alone, for JSON."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def table(self) -> str:
        """The rows as plain text. A method that does not work has its reason in place of numbers."""
        lines = [["method", *COLUMNS.values()]]
        for row in self.rows:
            cells = [shown(getattr(row, name), ".2f") for name in COLUMNS] if row.problem is None else [row.problem]
            lines.append([row.method, *cells])
        return aligned(lines)

    def __str__(self) -> str:
        return "\n\n".join([self.table(), textwrap.fill(self.recommendation, 120), self.code]).rstrip()


def recommend(rows: Sequence[Row], memory_mb: float | None = None) -> tuple[Row | None, str]:
    """The first row that works and fits into `memory_mb`, and why. What was not measured does not fit."""
    working = [row for row in rows if row.works]
    sizes = {row.method: row.memory_mb for row in working if row.memory_mb is not None}
    fits = [row for row in working if memory_mb is None or sizes.get(row.method, math.inf) <= memory_mb]
    if fits:
        chosen, limit = fits[0], "" if memory_mb is None else f" in {memory_mb:g} MB"
        why = f"Use {chosen.method}, the first method that works here{limit}"
        if chosen.method in (BACKPROP, CHECKPOINTED):
            return chosen, f"{why}: its gradient is exact."
        near = "" if chosen.cosine is None else f" (cosine {chosen.cosine:.2f})"
        check = "compare its accuracy with that of backpropagation on a smaller model or batch."
        return chosen, f"{why}. Its gradient is an approximation{near}: {check}"
    if not working:
        return None, "Nothing works here; the table says why."
    if not sizes:
        return None, "Memory is not counted on this device, so nobody knows what fits."
    least = min(sizes, key=sizes.__getitem__)
    return None, (
        f"Nothing that was measured fits into {memory_mb:g} MB; {least} needs least, {sizes[least]:.4g} MB. Take a "
        "smaller batch (or chunk= of gg.ForwardGradient), more pieces, or memory='replay'."
    )
