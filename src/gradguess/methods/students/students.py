"""The method: one step of a model in pieces, whose gradients come from students."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from gradguess.errors import InputError, check_choice
from gradguess.guesses.activation import ActivationPerturbation
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.students.rules import RULES, Known, Lessons, carried
from gradguess.methods.students.student import Bank, Built, Make
from gradguess.model.site import Layout, Site
from gradguess.model.task import tensors
from gradguess.step.base import State, Step
from gradguess.step.pull_back import OutputError, Pieces

Rule = Literal["loss", "outputs", "chain", "tangents"]
DEFAULTS: dict[str, tuple[Rule, ...]] = {"loss": ("loss",), "error": ("outputs", "chain")}  # by signal


@dataclass(frozen=True)
class Students(Method):
    """Each piece of the model learns from a small network that stands for all that lies above it.

    Use it with a model in pieces, `sites=n`. The gradient inside a piece is exact; at a cut it is the student's. The
    default is decoupled greedy learning (Belilovsky et al. 2019); as in deep supervision (Lee et al. 2015) the students
    are computed beside the model.

    Args:
        make: `make(shape, outputs)` returns the student for a cut, a module from (batch, *shape) to (batch, *outputs).
            None makes one that fits the cut: a transformer block for tokens, strided convolutions for maps, a residual
            block for vectors.
        signal: "loss" uses the gradient of the student's own loss, "error" the output error through the student's
            Jacobian.
        form: "direct" uses the signal at a cut itself, "chained" the one above, pulled back through the piece between.
        learn: what a student learns from: "loss", "outputs", "chain", "tangents", or a tuple of several. An empty tuple
            leaves the students as they were made. None is "loss" with that signal, else ("outputs", "chain").
        lr: the learning rate of the students, which have an Adam of their own.

    >>> import torch, gradguess as gg
    >>> layers = [layer for _ in range(6) for layer in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
    >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.Students(), sites=3)
    >>> x, t = torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> len(forward.learned)  # one student for each of the two cuts
    2
    """

    make: Make | None = None
    signal: Literal["loss", "error"] = "loss"
    form: Literal["direct", "chained"] = "direct"
    learn: Rule | tuple[Rule, ...] | None = None
    lr: float = 1e-3
    _built: Built = field(default_factory=dict, init=False, repr=False, compare=False)  # what `make` returned

    def __post_init__(self) -> None:
        check_students("Students", self.make, self.lr)
        check_choice("Students(signal)", self.signal, tuple(DEFAULTS))
        check_choice("Students(form)", self.form, ("direct", "chained"))
        learn = self.learn if self.learn is None or isinstance(self.learn, tuple) else (self.learn,)
        if learn is not None and (any(rule not in list(RULES) for rule in learn) or len(set(learn)) != len(learn)):
            raise InputError(
                f"Students(learn): expected one of {', '.join(map(repr, RULES))}, a tuple of several, or None, "
                f"found {self.learn!r}."
            )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What the students learn from."""
        if self.learn is None:
            return DEFAULTS[self.signal]
        return self.learn if isinstance(self.learn, tuple) else (self.learn,)

    @property
    def one_pass(self) -> bool:  # type: ignore[override]
        return "tangents" not in self.rules

    def draws(self, count: int) -> Draws | None:
        return Draws(ActivationPerturbation(), count) if "tangents" in self.rules else None

    def run(self, step: Step) -> tuple[Estimate, State]:
        cuts = _cuts(step.layout)
        bank = Bank(step, self.make, self.lr, self._built)
        known, jvp = Known(), None
        if "tangents" in self.rules:
            known.carried, seen = carried(step, cuts)
            jvp = seen.jvp
        asks = self.signal == "error" or "outputs" in self.rules
        looks = step.into is not None and step.into.checks  # a piece is differentiated before the losses are known
        if (asks or looks) and not step.keeps:
            outputs = step.passes.plain(lambda site, x, s: None)
            if looks:
                with torch.no_grad():
                    losses = step.task.losses(outputs)
                step.begin(losses, losses.new_zeros(0, len(losses)) if jvp is None else jvp)
            if asks:
                self._ask(bank, known, outputs)
        waits = asks and step.keeps
        lessons = Lessons(bank, self.rules, known)
        pieces = Pieces(
            step,
            cuts.values(),
            lessons.signal,
            through=() if step.detail else [site for site in step.layout.sites if site.name not in cuts],
            lag=int(self.form == "chained"),
            delivered=lessons.delivered if "chain" in self.rules else None,
            waits=waits,
        )
        once = jvp is None and (waits or not (asks or looks))
        outputs, losses = step.passes.graph(pieces.visit, fused=once)
        if waits:
            self._ask(bank, known, outputs)
        pieces.settle(losses)
        losses = losses.detach()
        jvp = losses.new_zeros(0, len(losses)) if jvp is None else jvp
        result = Estimate(losses.mean(), pieces.gradients.by_name, jvp, site_grads=pieces.site_grads, losses=losses)
        return result, replace(step.state, learned=bank.close())

    def _ask(self, bank: Bank, known: Known, outputs: object) -> None:
        """Note the model's output, and the error there."""
        known.output = tensors(outputs)[0].detach()  # the only one
        if self.signal == "error":
            (known.error,) = OutputError(bank.step.task, outputs).parts


def check_students(name: str, make: object, lr: float) -> None:
    """Refuse what cannot make students."""
    if make is not None and not callable(make):
        raise InputError(
            f"{name}(make): expected a function of (shape, outputs) that returns a module, found {make!r}."
        )
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < float("inf"):
        raise InputError(f"{name}(lr): expected a number of at least 0, found {lr!r}.")


def _cuts(layout: Layout) -> dict[str, Site]:
    """The sites above which the model learns something: a student stands for that."""
    top = layout.sites[-1]
    cuts = {site.name: site for site in layout.sites if site is not top or layout.tail}
    if not cuts:
        raise InputError("Students need at least one cut with a piece above it. Use sites=2 or more.")
    if not layout.in_a_line:
        raise InputError(
            "Students need cuts that follow one another in a line, each of which all of the model passes through; some "
            "of these sites lie on branches. Cut the model into pieces, sites=4 for instance."
        )
    for site in cuts.values():
        check_cut("Students", site)
    return cuts


def check_cut(name: str, site: Site) -> None:
    """Refuse a cut that no student can read."""
    if site.severed:
        raise InputError(
            f"{name} cannot cut at {site.name!r}: an operation between it and the next site, or the loss, has no "
            "derivative in PyTorch."
        )
    if site.batch_dim != 0 or not site.shape:
        raise InputError(
            f"{name}: expected cuts that give a tensor (batch, ...), with one row for each sample. The output of "
            f"{site.name!r} is not one: its batch is {'missing' if site.batch_dim is None else 'dimension 1'}, or it "
            "has one number for each sample. Name other modules with sites=[...]."
        )
