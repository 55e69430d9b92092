"""What a student learns from. A rule gives a number that the student shall make small.

    loss        the loss of its own outputs
    outputs     what the model said: the divergence from its class probabilities, or the relative error of its values
    chain       the relative error of `h` to the gradient that the piece above delivers at the cut anyway
    tangents    the relative error of `J_S y` to what a tangent pass measured along random directions `y`

To add a rule: a function here, and its line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

from gradguess.guesses.activation import ActivationPerturbation
from gradguess.layers.table import own_kernels
from gradguess.methods.students.student import Bank, Student
from gradguess.model.site import Site, at_least_float32
from gradguess.model.task import tensors
from gradguess.passes.forward_mode import dual_numbers, formula_kernels, tangent_rules, unpack_dual
from gradguess.step.measure import Drawing, measure
from gradguess.step.pull_back import OutputError, Piece, pull


def _loss(student: Student, lessons: Lessons) -> Tensor:
    return student.losses.sum() * student.share


def _outputs(student: Student, lessons: Lessons) -> Tensor:
    assert lessons.output is not None
    p, out = at_least_float32(student.p), at_least_float32(lessons.output)
    classes = class_dim(out, student.bank.step.task.targets)
    if classes is None:
        return _relative(student, p, out)
    apart = F.kl_div(p.log_softmax(classes), out.log_softmax(classes), log_target=True, reduction="none").sum(classes)
    return apart.reshape(len(p), -1).mean(1).sum() * student.share


def _chain(student: Student, lessons: Lessons) -> Tensor:
    return _relative(student, student.h, student.delivered)


def _tangents(student: Student, lessons: Lessons) -> Tensor:
    """With the residual `r` held fast, the gradient of the error is that of `rᵀ J_S y = ⟨y, J_Sᵀ r⟩`.

    PyTorch would take the mean and the spread for constants in a gradient of the tangent of a layer norm or batch norm;
    a gradient of their gradient is right.
    """
    found = []
    for y, u in lessons.carried[student.site.name]:
        free = _moved(student, y).detach().requires_grad_()
        error = _relative(student, free, u)
        (r,) = pull([error], [free])
        (h,) = pull([student.p], [student.s], [r], create_graph=True)
        product = (at_least_float32(h) * at_least_float32(y)).sum()
        found.append(error.detach() + product - product.detach())
    return torch.stack(found).mean()


def _moved(student: Student, y: Tensor) -> Tensor:
    """`J_S y`."""
    s, model = student.s.detach(), student.bank.step.task.model
    kernels = formula_kernels(student.blueprint.module)
    with torch.no_grad(), own_kernels(), kernels, tangent_rules(model), dual_numbers():
        return unpack_dual(student(fwAD.make_dual(s, y)))[1]


RULES: dict[str, Callable[[Student, Lessons], Tensor]] = {
    "loss": _loss,
    "outputs": _outputs,
    "chain": _chain,
    "tangents": _tangents,
}


class Lessons:
    """What the students of a step are asked for at their cuts, and learn there.

    A student learns as soon as it has given its signal; by the rule "chain", once the piece above has delivered its
    gradient.

    Attributes:
        output: of the model, where a signal or a rule asks for it.
        error: `e`, the derivative of each sample's loss with respect to the output, where the signal asks for it.
        carried: per cut: its directions and the output's tangent, (y, u), of each tangent pass.
    """

    output: Tensor | None = None
    error: Tensor | None = None

    def __init__(self, bank: Bank, learn: tuple[str, ...]) -> None:
        self.bank, self.learn = bank, learn
        self.carried: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._waiting: dict[Piece, Student] = {}

    def carry(self, cuts: Mapping[str, Site]) -> Tensor:
        """Tangent passes with white noise at the cuts. Returns the derivatives, (passes, batch).

        A pass carries the directions of all cuts. To the student of one of them those of the others are noise of mean
        zero; `isolate=True` gives each cut a pass of its own.
        """
        directions: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in cuts}

        def watch(number: int, site: Site, y: Tensor, gate: Tensor | None, scale: Tensor) -> None:
            directions[site.name].append((number, y * scale.to(y.dtype)))

        drawing = Drawing(self.bank.step, ActivationPerturbation())
        seen = measure(drawing, lambda site: site.name in cuts, balance=True, watch=watch)
        tangents = [parts[0] for parts in seen.output_tangents]
        self.carried = {name: [(y, tangents[number]) for number, y in ys] for name, ys in directions.items()}
        return seen.jvp

    def ask(self, outputs: Any, signal: str) -> None:
        """Note the model's output, and with the signal "error" the error there."""
        self.output = tensors(outputs)[0].detach()  # the only one
        if signal == "error":
            (self.error,) = OutputError(self.bank.step.task, outputs).parts

    def signal(self, piece: Piece) -> Tensor:
        """`h` of the student of a cut."""
        student = self.bank.student(piece.site, piece.s, twice=not {"chain", "tangents"}.isdisjoint(self.learn))
        error, chain = self.error, "chain" in self.learn
        if error is None and self.learn == ("loss",):  # the signal is what the student learns from
            student.h, grad = pull([student.losses], [student.s, student.weights])
            self.bank.add(piece.site, grad * student.share)
            return student.h
        end, seeds = (student.losses, None) if error is None else (student.p, [error])
        (student.h,) = pull([end], [student.s], seeds, create_graph=chain, retain_graph=True)
        if chain:
            self._waiting[piece] = student
        else:
            self._teach(student)
        return student.h.detach()

    def delivered(self, piece: Piece, g: Tensor) -> None:
        """`g` is the gradient that the piece above a cut delivers there."""
        if piece in self._waiting:
            student = self._waiting.pop(piece)
            student.delivered = g
            self._teach(student)

    def _teach(self, student: Student) -> None:
        if self.learn:
            with torch.enable_grad():
                total = torch.stack([RULES[rule](student, self) for rule in self.learn]).sum()
            self.bank.add(student.site, pull([total], [student.weights])[0])


def class_dim(output: Tensor, targets: Any) -> int | None:
    """The dimension of the classes where targets are their numbers, as in `nn.CrossEntropyLoss`; None elsewhere."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return None
    fits = (
        [dim for dim in (output.dim() - 1, 1) if output.select(dim, 0).shape == targets.shape] if output.dim() else []
    )
    return fits[0] if fits else None


def _relative(student: Student, found: Tensor, wanted: Tensor) -> Tensor:
    """`|found - wanted|² / |wanted|²` over the batch of all processes; the parts of a batch weigh by their samples."""
    step, wanted = student.bank.step, at_least_float32(wanted.detach())
    size = wanted.square().sum()
    total, share = step.pool.sum(torch.stack([size, size.new_full((), step.share)]))
    return (at_least_float32(found) - wanted).square().sum() * (share / total.clamp_min(torch.finfo(size.dtype).tiny))
