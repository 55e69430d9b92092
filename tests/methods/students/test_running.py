"""`gg.Students` in the engine: state, parts of a batch, traces, buffers, masks, other models, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradguess as gg
from asserts import assert_same
from gradguess import captured_step
from gradguess.methods import compiled
from gradguess.methods.run import Plan, find_layout, run_step
from gradguess.model.task import Task
from gradguess.step.base import Options, State
from pieces import (
    CLASSES,
    METHODS,
    batch_of,
    close,
    cross_entropy,
    grads,
    images,
    images_model,
    model_of,
    trained,
)
from traced_graphs import as_compiled

# --- state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_step_writes_to_nothing_that_it_is_given(name):
    plan = Plan(METHODS[name], 4, Options(), detail=False)
    task = Task(model_of(), cross_entropy, *batch_of())
    layout, state = find_layout(plan, task), State()
    for number in range(2):
        _, state, _ = run_step(plan, task, layout, torch.Generator().manual_seed(number), state)
    before = copy.deepcopy(state)
    versions = [t._version for entries in state.learned.values() for t in entries.values()]
    made = []
    for _ in range(2):
        torch.rand(3)  # global generators have no say
        random = torch.get_rng_state()
        made.append(run_step(plan, task, layout, torch.Generator().manual_seed(5), state))
        assert torch.equal(torch.get_rng_state(), random)
        assert_same({**state.learned}, {**before.learned})
        assert [t._version for entries in state.learned.values() for t in entries.values()] == versions
    assert_same(made[0][0].grads, made[1][0].grads)
    assert_same({**made[0][1].learned}, {**made[1][1].learned})
    moved = [not torch.equal(made[0][1].learned[site]["weights"], e["weights"]) for site, e in state.learned.items()]
    assert len(moved) == 3
    assert all(moved)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name):
    wanted, whole = trained(METHODS[name], steps=4)
    model = model_of()
    _, first = trained(METHODS[name], steps=2, model=model)
    state = {key: value.clone() for key, value in first.state_dict().items()}
    method = replace(METHODS[name])  # as in a new process: nothing is remembered
    second = gg.ForwardGradient(model, method, sites=4, seed=99)
    second.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in (2, 3):
        optimiser.zero_grad()
        second(cross_entropy, *batch_of(number))
        assert_same(grads(model), wanted[number])
        optimiser.step()
    assert_same(second.state_dict(), whole.state_dict())


def test_students_start_from_the_seed_and_from_nothing_else():
    starts = []
    for seed in (0, 0, 1):
        model = model_of()
        forward = gg.ForwardGradient(model, gg.Students(learn=()), sites=4, seed=seed)
        torch.manual_seed(len(starts))
        random = torch.get_rng_state()
        forward(cross_entropy, *batch_of())
        assert torch.equal(torch.get_rng_state(), random)
        starts.append({site: entries["weights"] for site, entries in forward.learned.items()})
    assert_same(starts[0], starts[1])
    assert all(not torch.equal(starts[0][site], weights) for site, weights in starts[2].items())
    first, second, _ = starts[0].values()
    assert not torch.equal(first, second)


# --- parts of a batch, replay, traces -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("name", ["loss", "loss chained", "local"])
def test_chunks_give_the_gradients_and_the_students_of_the_whole(name, chunk):
    wanted, whole = trained(METHODS[name])
    found, parts = trained(METHODS[name], chunk=chunk)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-7)
    for site, entries in whole.learned.items():
        assert parts.learned[site].keys() == entries.keys()
        assert parts.learned[site]["count"] == 3
        close({**parts.learned[site]}, {**entries}, 1e-6)


@pytest.mark.parametrize("name", ["error", "error chained"])
def test_chunks_of_relative_rules_weigh_by_their_samples(name):
    """They divide by the size of the chunk's own gradients. Adam's first mean is a tenth of the gradient."""
    _, forward = trained(METHODS[name], steps=1, chunk=4)
    assert all(set(entries) == {"weights", "mean", "square", "count"} for entries in forward.learned.values())
    x, t = batch_of(0)
    means: dict[str, Any] = {}
    for rows, share in ((slice(0, 4), 4 / 6), (slice(4, 6), 2 / 6)):
        part = gg.ForwardGradient(model_of(), METHODS[name], sites=4, seed=2)
        part(cross_entropy, x[rows], t[rows])
        for site, entries in part.learned.items():
            means[site] = means.get(site, 0) + share * entries["mean"]
    for site, mean in means.items():
        torch.testing.assert_close(forward.learned[site]["mean"], mean)


@pytest.mark.parametrize("name", METHODS)
def test_replay_gives_what_store_gives(name):
    wanted, stored = trained(METHODS[name])
    found, replayed = trained(METHODS[name], memory="replay")
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    for site, entries in stored.learned.items():
        close({**replayed.learned[site]}, {**entries}, 1e-7)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "local"])
def test_a_traced_step_is_the_same(name, monkeypatch):
    monkeypatch.setattr(compiled, "compiled", as_compiled)
    wanted, plain = trained(METHODS[name], steps=5)
    found, traced = trained(METHODS[name], steps=5, compile=True)  # a warning would be an error
    assert len(traced.plan.runner._graphs) == 1
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-8)
    for site, entries in plain.learned.items():
        close({**traced.learned[site]}, {**entries}, 1e-6)


@pytest.mark.parametrize("name", ["loss", "error chained"])
def test_a_captured_step_takes_the_state_over_in_place(name, monkeypatch):
    """Without a device every step runs by itself: what is tested is the memory in which students live."""
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "on_side_stream", lambda function: function())
    monkeypatch.setattr(captured_step, "WARM_UP", 99)
    wanted, plain = trained(METHODS[name], steps=4)
    model = model_of()
    forward = gg.ForwardGradient(model, METHODS[name], sites=4, seed=2)
    optimiser = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05, dtype=torch.float64))  # not in float32
    optimiser.param_groups[0]["capturable"] = True
    step = gg.CapturedStep(forward, optimiser, cross_entropy)
    places = []
    for number in range(4):
        step(*batch_of(number))
        places.append([t.data_ptr() for entries in forward.learned.values() for t in entries.values()])
        assert_same(grads(model), wanted[number])
    assert all(place == places[0] for place in places)
    assert_same({**forward.learned}, {**plain.learned})
    assert forward.plan.method.kind(1) == forward.plan.method.kind(17) is not None


@pytest.mark.parametrize(
    ("method", "recorded"), [(METHODS["loss"], True), (METHODS["error"], True), (METHODS["tangents"], False)]
)
def test_one_pass_over_batch_norm_may_be_recorded(method, recorded, monkeypatch):
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "on_side_stream", lambda function: function())
    model = images_model()
    forward = gg.ForwardGradient(model, method, sites=3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    optimiser.param_groups[0]["capturable"] = True
    step = gg.CapturedStep(forward, optimiser, cross_entropy)
    step(*images())
    assert step._is_fragile("plain") is not recorded


# --- buffers and masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_batch_norm_writes_its_buffers_as_under_backpropagation(name):
    model, other = images_model(), images_model()
    x, t = images()
    forward = gg.ForwardGradient(model, METHODS[name], sites=3)
    for _ in range(2):
        forward(cross_entropy, x, t)
        cross_entropy(other(x), t).mean().backward()
    close(dict(model.named_buffers()), dict(other.named_buffers()))


@pytest.mark.parametrize("name", METHODS)
def test_what_follows_a_cut_may_work_in_place(name):
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU(inplace))]
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace), *layers, nn.Linear(8, CLASSES)).double()
        forward = gg.ForwardGradient(model, METHODS[name], sites=["0", "2", "4", "8"])
        forward(cross_entropy, *batch_of())
        found.append(grads(model) | {site: entries["weights"] for site, entries in forward.learned.items()})
    close(*found)


def test_the_top_piece_has_the_gradient_of_backpropagation():
    """With batch statistics inside the pieces, and masks of dropout."""
    model = images_model()
    model.insert(len(model) - 1, nn.Dropout(0.5))
    other = copy.deepcopy(model)
    x, t = images()
    torch.manual_seed(7)
    gg.ForwardGradient(model, gg.Students(), sites=3)(cross_entropy, x, t)
    torch.manual_seed(7)
    cross_entropy(other(x), t).mean().backward()
    found, wanted = grads(model), grads(other)
    top = [name for name in wanted if name.startswith(("4.", "8."))]
    assert len(top) == 6
    close({name: found[name] for name in top}, {name: wanted[name] for name in top})
