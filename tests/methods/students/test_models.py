"""`gg.Students` on transformers, convolutions, half precision and frozen layers; the default students; refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.layers.table import own_kernels
from gradguess.methods.students.default import default_student
from gradguess.methods.students.rules import RULES, Lessons
from gradguess.methods.students.student import Student
from gradguess.passes.forward_mode import formula_kernels
from models import Net
from pieces import (
    CLASSES,
    METHODS,
    WIDTH,
    batch_of,
    cross_entropy,
    grads,
    images,
    images_model,
    model_of,
)


class Tokens(nn.Module):
    """A character transformer, with an output for every token; with `pooled`, one for each sequence."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.embed, self.blocks = nn.Embedding(9, 8), nn.ModuleList(layer() for _ in range(4))
        self.head, self.pooled = nn.Linear(8, 9), pooled

    def forward(self, x: Tensor) -> Tensor:
        s = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=s.dtype)
        for block in self.blocks:
            s = block(s, src_mask=mask)
        return self.head(s.mean(1) if self.pooled else s)


def tokens_loss(out: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.mT, t, reduction="none").mean(1)


KINDS = {
    "tokens": (Tokens, tokens_loss, lambda: (torch.randint(9, (4, 7)),) * 2),
    "vectors": (model_of, cross_entropy, batch_of),
    "maps": (images_model, cross_entropy, images),
}


@pytest.mark.parametrize("rule", ["loss", "outputs", "chain", "tangents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_default_student_follows_the_slope_of_its_rule(kind, rule, monkeypatch):
    """Against finite differences, through layer norm, batch norm and attention; what it is compared with is fixed."""
    torch.manual_seed(0)
    make, loss_fn, batch = KINDS[kind]
    model, (x, t), seen = make().double(), batch(), []
    real = RULES[rule]

    def value(student: Student, lessons: Lessons, weights: Tensor) -> Tensor:
        other = copy.copy(student)
        vars(other).pop("losses", None)
        other.weights = weights.detach().requires_grad_()
        other.s = student.s.detach().requires_grad_()
        with own_kernels(), formula_kernels(student.blueprint.module), torch.enable_grad():
            other.p = other(other.s)
            (other.h,) = torch.autograd.grad(other.losses, other.s, torch.ones_like(other.losses), create_graph=True)
            return real(other, lessons).detach()

    def watched(student: Student, lessons: Lessons) -> Tensor:
        total, w = real(student, lessons), student.weights
        (found,) = torch.autograd.grad(total, w, retain_graph=True)
        way = torch.randn(len(w), generator=torch.Generator().manual_seed(3), dtype=w.dtype) / len(w) ** 0.5
        slope = (value(student, lessons, w + 1e-5 * way) - value(student, lessons, w - 1e-5 * way)) / 2e-5
        torch.testing.assert_close(found @ way, slope, rtol=1e-4, atol=1e-7)
        seen.append(student.site.name)
        return total

    monkeypatch.setitem(RULES, rule, watched)
    learn = (rule,) if rule != "loss" else ("loss", "outputs")  # alone it is the signal itself
    gg.ForwardGradient(model, gg.Students(learn=learn), sites=3)(loss_fn, x, t)
    assert len(seen) == 2


def test_a_causal_student_does_not_see_later_tokens():
    student = default_student((6, 32), (6, 11))
    s = torch.randn(2, 6, 32, requires_grad=True)
    (g,) = torch.autograd.grad(student(s)[:, 2].sum(), s)
    assert (g[:, :3] != 0).any(-1).all()
    assert (g[:, 3:] == 0).all()


@pytest.mark.parametrize("outputs", [(), (3,), (2, 3), (3, 9, 9)])
@pytest.mark.parametrize("shape", [(8,), (6, 16), (4, 1, 1), (4, 9, 7), (3, 70, 40)])
def test_default_students_have_the_outputs_shape(shape, outputs):
    assert default_student(shape, outputs)(torch.randn(3, *shape)).shape == (3, *outputs)


def test_under_autocast_the_weights_stay_float32():
    torch.manual_seed(0)
    model = model_of().float()
    for name in ("loss", "error chained", "tangents"):
        forward = gg.ForwardGradient(model, METHODS[name], sites=4)
        x, t = batch_of()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                loss = forward(cross_entropy, x.float(), t)
        assert torch.isfinite(loss)
        assert all(t.dtype == torch.float32 for entries in forward.learned.values() for t in entries.values())
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_under_autocast_a_student_is_called_with_float32_weights():
    class Noted(nn.Linear):
        def forward(self, s: Tensor) -> Tensor:
            seen.append((s.dtype, self.weight.dtype))
            return super().forward(s)

    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES))
    forward = gg.ForwardGradient(model, gg.Students(lambda shape, outputs: Noted(*shape, *outputs)), sites=3)
    with torch.autocast("cpu", torch.bfloat16):
        forward(cross_entropy, batch_of()[0].float(), batch_of()[1])
    assert set(seen) == {(torch.bfloat16, torch.float32)}


def test_frozen_layers_below_and_between():
    for frozen in (slice(0, 2), slice(2, 4)):
        model = model_of()
        model[frozen].requires_grad_(False)
        for method in (gg.Students(), gg.Students(form="chained"), gg.Students(signal="error")):
            model.zero_grad()
            forward = gg.ForwardGradient(model, method, sites=["1", "3", "5", "8"] if frozen.start else ["3", "5", "8"])
            forward(cross_entropy, *batch_of())
            assert {name for name, p in model.named_parameters() if p.requires_grad} == grads(model).keys()


# --- what it refuses -------------------------------------------------------------------------------------------------


def pair() -> nn.Module:
    def run(m: nn.Module, x: Tensor) -> Any:
        s = m.body(x).relu()
        return m.a(s), m.b(s)

    return Net(run, body=nn.Linear(5, WIDTH), a=nn.Linear(WIDTH, CLASSES), b=nn.Linear(WIDTH, CLASSES))


def wrong_shape(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[0], outputs[0] + 1)


@pytest.mark.parametrize("method", [gg.Students(), gg.Students(learn="chain"), gg.Students(signal="error")])
def test_a_model_without_a_cut_is_refused(method):
    with pytest.raises(gg.InputError, match=r"at least one cut with a piece above it\. Use sites=2"):
        gg.ForwardGradient(model_of(), method, sites=1)(cross_entropy, *batch_of())


@pytest.mark.parametrize(
    ("method", "model", "sites", "message"),
    [
        (gg.Students(), model_of(), "auto", "follow one another in a line.*sites=4"),
        (gg.Students(lambda shape, outputs: 3), model_of(), 4, r"returned? .*int"),
        (gg.Students(wrong_shape), model_of(), 4, r"must return the shape of the model's outputs, \(6, 4\), found"),
        (gg.Students(), pair().double(), ["body"], "returns one floating-point tensor.*found 2"),
    ],
)
def test_what_cannot_be_run_says_why(method, model, sites, message):
    loss = lambda out, t: cross_entropy(out[0] if isinstance(out, tuple) else out, t)  # noqa: E731
    with pytest.raises(gg.InputError, match=message):
        gg.ForwardGradient(model, method, sites=sites)(loss, *batch_of())
