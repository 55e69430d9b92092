"""The methods: a model in pieces whose gradients come from students, and students that draw directions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gradguess.errors import InputError, check_choice
from gradguess.guesses.activation import ActivationPerturbation
from gradguess.guesses.frames import Frame
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.guessed import estimate_from
from gradguess.methods.students.rules import RULES, Lessons
from gradguess.methods.students.student import Bank, Built, Make
from gradguess.model.site import Layout, Site, at_least_float32
from gradguess.step.base import State, Step
from gradguess.step.measure import Drawing
from gradguess.step.pull_back import OutputError, Pieces, pull

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
        if any(rule not in list(RULES) for rule in self.rules) or len(set(self.rules)) != len(self.rules):
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
        lessons = Lessons(bank, self.rules)
        jvp = lessons.carry(cuts) if "tangents" in self.rules else None
        asks = self.signal == "error" or "outputs" in self.rules
        looks = step.into is not None and step.into.checks  # a piece is differentiated before the losses are known
        if (asks or looks) and not step.keeps:
            outputs = step.passes.plain(lambda site, x, s: None)
            if looks:
                with torch.no_grad():
                    losses = step.task.losses(outputs)
                step.begin(losses, losses.new_zeros(0, len(losses)) if jvp is None else jvp)
            if asks:
                lessons.ask(outputs, self.signal)
        waits = asks and step.keeps
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
            lessons.ask(outputs, self.signal)
        pieces.settle(losses)
        losses = losses.detach()
        jvp = losses.new_zeros(0, len(losses)) if jvp is None else jvp
        result = Estimate(losses.mean(), pieces.gradients.by_name, jvp, site_grads=pieces.site_grads, losses=losses)
        return result, replace(step.state, learned=bank.close())


@dataclass(frozen=True)
class LocalGuess(Method):
    """Directions `y_i = ± h_i / |h_i|`, with `h_i` the gradient of the loss of a student at the site.

    The sign is independent for every site and sample: without that the sites' derivatives would not separate. The
    estimate is `c y`, with `c` measured by the tangent pass. Covariance: the projector on `h_i`. So the mean of the
    estimate is the true gradient's projection on `h_i`. Where a site is the model's output, `h_i` is the gradient of
    the loss itself, and the estimate is exact in the mean. The students learn from their own loss, as those of
    `gg.Students`.

    Args:
        make: `make(shape, outputs)` returns the student for a site, as in `gg.Students`.
        lr: the learning rate of the students.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.LocalGuess(), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> est.directions["0"].square().sum(-1).allclose(torch.ones(1, 5))
    True
    """

    make: Make | None = None
    lr: float = 1e-3
    _built: Built = field(default_factory=dict, init=False, repr=False, compare=False)  # what `make` returned

    apart = True

    def __post_init__(self) -> None:
        check_students("LocalGuess", self.make, self.lr)

    def run(self, step: Step) -> tuple[Estimate, State]:
        bank = Bank(step, self.make, self.lr, self._built)
        for site in step.layout.sites:
            if not site.is_output:
                check_cut("LocalGuess", site)
        result = estimate_from(_LocalDrawing(step, bank))
        return result, replace(step.state, learned=bank.close())


class _LocalDrawing(Drawing):
    """Draws along the gradients of the students' losses. A student learns when its site is met first."""

    def __init__(self, step: Step, bank: Bank) -> None:
        self.step, self.bank, self.met = step, bank, set[str]()

    def reads_gate(self, site: Site) -> bool:
        return False

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        return _Ray(at_least_float32(site.flat(self._gradient(site, s))))

    def _gradient(self, site: Site, s: Tensor) -> Tensor:
        """`h`, the gradient of each sample's local loss."""
        if site.is_output:
            return OutputError(self.step.task, self.bank.outputs.wrap(s)).parts[0]
        student = self.bank.student(site, s)
        h, grad = pull([student.losses], [student.s, student.weights])
        if site.name not in self.met:
            self.bank.add(site, grad * student.share)
        self.met.add(site.name)
        return h


class _Ray(Frame):
    """`± u` with `u = h / |h|`: zero where `h` is."""

    latent = 1

    def __init__(self, h: Tensor) -> None:
        size = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        self.u = h / torch.where(size > 0, size, 1.0)
        self.batch, self.dtype = len(h), h.dtype

    def apply(self, z: Tensor) -> Tensor:
        return torch.where(z < 0, -self.u, self.u)

    def adjoint(self, v: Tensor) -> Tensor:
        return (v * self.u).sum(-1, keepdim=True)


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
