"""Whole steps with `derivative="finite"`: feedback, memory, buffers, inference mode, what is refused."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from asserts import assert_close, assert_same
from gaps import gap
from models import GUESSES, cross_entropy, generator, make


@pytest.mark.parametrize("form", ["direct", "chained", "corrected"])
def test_feedback_learns_the_same(form):
    case, learned = make("residual"), []
    for derivative in ("dual", "finite"):
        forward = gg.ForwardGradient(case.model, gg.Feedback(gg.WPerp(k=3), form=form), derivative=derivative)
        for _ in range(3):
            forward(*case.args)
        learned.append({site: entries["B"] for site, entries in forward.learned.items()})
    assert all(B.abs().max() > 0 for B in learned[0].values())
    assert_close(learned[1], learned[0], 1e-6)


def test_feedback_on_part_of_the_batch():
    """The lesson comes from passes aside: they are by differences as well."""
    case, _ = gap("function without jvp")
    feedback = gg.Feedback(gg.WPerp(k=3), form="direct", fraction=0.6)
    forward = gg.ForwardGradient(case.model, feedback, derivative="finite")
    forward(*case.args)
    assert all(entries["B"].abs().max() > 0 for entries in forward.learned.values())


@pytest.mark.parametrize("options", [{"memory": "replay"}, {"chunk": 2}], ids=str)
@pytest.mark.parametrize("name", ["residual", "cnn"])
def test_less_memory_gives_the_same(name, options):
    case = make(name)
    found = []
    for kind in ({}, options):
        case.model.zero_grad()
        gg.ForwardGradient(case.model, gg.WPerp(k=3), tangents=2, derivative="finite", **kind)(*case.args)
        found.append({n: p.grad for n, p in case.model.named_parameters()})
    assert_close(found[1], found[0], 1e-7)


@pytest.mark.parametrize("kind", ["activation", "shared", "weight"])
def test_inside_inference_mode(kind):
    """Nothing is lost, since there are no tangents. Gradients are tensors that a graph can hold."""
    case = make("residual")
    expected = gg.estimate(case.model, GUESSES[kind], *case.args, generator=generator(), derivative="finite")
    with torch.inference_mode():
        inputs = case.inputs * 1
        args = cross_entropy, inputs, case.targets
        found = gg.estimate(case.model, GUESSES[kind], *args, generator=generator(), derivative="finite")
        gg.ForwardGradient(case.model, GUESSES[kind], derivative="finite")(*args)
    assert_same(found.grads, expected.grads)
    assert not any(p.grad.is_inference() for p in case.model.parameters())


@pytest.mark.parametrize(
    "options", [{"guess": gg.Feedback(gg.WPerp())}, {"guess": gg.WPerp(), "balance": True}], ids=str
)
def test_balance_needs_the_outputs(options):
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, memory="replay", derivative="finite", **options)
    with pytest.raises(gg.InputError, match=r"memory='replay' with derivative='finite' cannot balance.*memory='store'"):
        forward(*case.args)
