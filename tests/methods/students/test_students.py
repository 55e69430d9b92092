"""`gg.Students` against a loop written by hand: detached pieces, `torch.autograd`, `torch.optim.Adam`. Float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.methods.students.rules import Lessons
from pieces import BATCH, CLASSES, PIECES, SITES, WIDTH, batch_of, cross_entropy, model_of, small

LEARN = [
    ("loss",),
    ("outputs",),
    ("chain",),
    ("tangents",),
    ("loss", "chain"),
    ("outputs", "chain", "tangents"),
    (),
]


# --- the twin --------------------------------------------------------------------------------------------------


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum() / wanted.square().sum()


@dataclass
class Twin:
    """The method, from its definition: no streaming, no state, no passes of the library."""

    model: nn.Sequential
    signal: str
    form: str
    learn: tuple[str, ...]
    lr: float = 1e-2
    seed: int = 0
    students: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [self.model[rows] for rows in PIECES]
        self.students = []
        for i in range(len(SITES)):
            torch.manual_seed(self.seed + i)
            self.students.append(small((WIDTH,), (CLASSES,)).double())
        self.optimisers = [torch.optim.Adam(student.parameters(), lr=self.lr) for student in self.students]

    def above(self, i: int, s: Tensor) -> Tensor:
        for piece in self.pieces[i + 1 :]:
            s = piece(s)
        return s

    def step(self, x: Tensor, t: Tensor, directions: list[Tensor]) -> dict[str, Tensor]:
        leaves, tops = [x], []
        for piece in self.pieces:
            tops.append(piece(leaves[-1]))
            leaves.append(tops[-1].detach().requires_grad_())
        losses = cross_entropy(tops[-1], t)
        exact = torch.autograd.grad(losses.sum(), leaves[-2], retain_graph=True)[0]
        out = leaves[-1].detach()
        e = torch.autograd.grad(cross_entropy(leaves[-1], t).sum(), leaves[-1])[0]
        predicted, said = [], []
        for student, s in zip(self.students, leaves[1:-1], strict=True):
            p = student(s)
            end = cross_entropy(p, t).sum() if self.signal == "loss" else (p * e).sum()
            predicted.append(torch.autograd.grad(end, s, create_graph=True)[0])
            said.append(p)

        def down(i: int, g: Tensor) -> Tensor:  # over piece i, to the cut below it
            return torch.autograd.grad(tops[i], leaves[i], g, retain_graph=True)[0]

        last = len(SITES) - 1
        used = [h.detach() for h in predicted]
        if self.form == "chained":
            used = [down(i + 1, used[i + 1]) if i < last else exact for i in range(len(SITES))]
        grads: dict[str, Tensor] = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for i, piece in enumerate(self.pieces):
            end, g = (losses, torch.ones_like(losses)) if i > last else (tops[i], used[i])
            found = torch.autograd.grad(end, list(piece.parameters()), g / len(x), retain_graph=True)
            grads |= {names[id(p)]: grad for p, grad in zip(piece.parameters(), found, strict=True)}
        moved: list[Tensor] = []
        for i, s in enumerate(leaves[1:-1]):
            moved.append(torch.func.jvp(lambda v, i=i: self.above(i, v), (s.detach(),), (directions[i],))[1].detach())
        total_moved = sum(moved)
        for i, (student, s) in enumerate(zip(self.students, leaves[1:-1], strict=True)):
            delivered = down(i + 1, used[i + 1]) if i < last else exact
            along = torch.func.jvp(student, (s.detach(),), (directions[i],))[1]
            terms = {
                "loss": cross_entropy(said[i], t).mean(),
                "outputs": (out.softmax(1) * (out.log_softmax(1) - said[i].log_softmax(1))).sum(1).mean(),
                "chain": relative(predicted[i], delivered),
                "tangents": relative(along, total_moved),
            }
            self.optimisers[i].zero_grad()
            if self.learn:
                sum(terms[rule] for rule in self.learn).backward(inputs=list(student.parameters()))  # type: ignore[union-attr]
            self.optimisers[i].step()
        return grads


def weights_of(student: nn.Module) -> Tensor:
    """All weights of a student as the library holds them: those that fill whole lines of 16 numbers first."""
    own = sorted(student.parameters(), key=lambda p: p.numel() % 16 != 0)
    return torch.cat([p.detach().reshape(-1) for p in own])


class Spy:
    """The directions that a tangent pass carries, as the library draws them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directions: list[Tensor] = [torch.zeros(BATCH, WIDTH, dtype=torch.float64) for _ in SITES]
        inner = Lessons.carry

        def watched(lessons: Lessons, cuts: Any) -> Any:
            jvp = inner(lessons, cuts)
            self.directions = [lessons.carried[name][0][0] for name in SITES]
            return jvp

        monkeypatch.setattr(Lessons, "carry", watched)


@pytest.mark.parametrize("learn", LEARN, ids="+".join)
@pytest.mark.parametrize("form", ["direct", "chained"])
@pytest.mark.parametrize("signal", ["loss", "error"])
def test_three_steps_are_those_of_the_loop(signal, form, learn, monkeypatch):
    spy = Spy(monkeypatch)
    method = gg.Students(small, signal, form, learn, lr=1e-2)
    ours, theirs = model_of(), model_of()
    forward = gg.ForwardGradient(ours, method, sites=[*SITES, "8"], seed=3)
    twin = Twin(theirs, signal, form, learn, seed=3)
    optimiser = torch.optim.SGD(ours.parameters(), lr=0.1)
    for number in range(3):
        x, t = batch_of(number)
        optimiser.zero_grad()
        loss = forward(cross_entropy, x, t)
        torch.testing.assert_close(loss, cross_entropy(theirs(x), t).mean())
        grads = twin.step(x, t, spy.directions)
        found = {name: p.grad for name, p in ours.named_parameters()}
        _close(found, grads)
        for name, student in zip(SITES, twin.students, strict=True):
            torch.testing.assert_close(forward.learned[name]["weights"], weights_of(student), rtol=1e-8, atol=1e-10)
        optimiser.step()
        with torch.no_grad():
            for p, name in ((p, name) for name, p in theirs.named_parameters()):
                p -= 0.1 * grads[name]


def _close(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
