"""`gg.Students` in the engine: state, parts of a batch, traces, buffers, masks, other models, what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradguess as gg
from asserts import assert_same
from gradguess.compile import compiler
from pieces import (
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
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    wanted, plain = trained(METHODS[name], steps=5)
    found, traced = trained(METHODS[name], steps=5, compile=True)  # a warning would be an error
    assert len(traced.plan.runner._graphs) == 1
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-8)
    for site, entries in plain.learned.items():
        close({**traced.learned[site]}, {**entries}, 1e-6)


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
