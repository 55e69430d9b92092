"""`gg.CapturedStep` without a GPU: its steps are those made one by one, in the same memory; and what it refuses."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess import captured_step
from gradguess.step.base import State
from models import BATCH, CLASSES, INPUTS, Case, cross_entropy, make
from tape import on_tape


class Twins:
    """A captured step, and the same steps made one by one on a copy of the model."""

    def __init__(self, case: Case, method: Any, **options: Any) -> None:
        self.case, self.other = case, copy.deepcopy(case)
        self.forward, self.plain = (gg.ForwardGradient(c.model, method, **options) for c in (self.case, self.other))
        optimiser, self.optimiser = (
            torch.optim.SGD(c.model.parameters(), lr=0.0625, fused=True) for c in (self.case, self.other)
        )
        self.step = gg.CapturedStep(self.forward, optimiser, case.loss_fn)

    def advance(self) -> None:
        """Both make a step, with the same result."""
        self.optimiser.zero_grad()
        torch.manual_seed(self.plain.steps)
        expected = self.plain(*self.other.args)
        self.optimiser.step()
        torch.manual_seed(self.forward.steps)
        pairs: list[tuple[Any, Any]] = [(self.step(self.case.inputs, self.case.targets), expected)]
        pairs += [(_plain(getattr(one, kind)) for one in (self.forward, self.plain)) for kind in ("kept", "learned")]
        pairs.append((dict(self.case.model.state_dict()), dict(self.other.model.state_dict())))
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert self.forward.steps == self.plain.steps
        assert self.step.state is self.forward.state

    def places(self) -> list[int]:
        """Where the state lies in memory."""
        entries = (*self.forward.kept.values(), *self.forward.learned.values())
        return [t.data_ptr() for values in entries for t in values.values()]


def _plain(entries: Any) -> dict[str, dict[str, Any]]:
    return {site: dict(values) for site, values in entries.items()}


def network(*middle: nn.Module, outputs: int = CLASSES) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 8), *middle, nn.Linear(8, outputs)).double()
    return Case(model, torch.randn(BATCH, INPUTS).double(), torch.randint(CLASSES, (BATCH,)))


KINDS = {"step", "refresh"}
RECORDED = {  # what of a run is recorded: nothing where it would not be the same again, or waits for a number
    "shared": (lambda: make("relu-bias"), gg.WPerp(k=2, refresh=2), {}, KINDS),
    "a sketch": (lambda: make("transformer"), gg.WPerp(k=2, refresh=2), {}, KINDS),
    "feedback": (lambda: make("relu-bias"), gg.Feedback(gg.WPerp(k=3, refresh=2)), {}, None),
    "students": (lambda: make("relu-bias"), gg.Students(signal="error", form="chained", lr=1e-2), {}, None),
    "each sample's own": (lambda: make("relu-bias"), gg.WPerp(k=2, refresh=2, solver="subspace"), {}, {"step"}),
    "iterations": (lambda: make("relu-bias"), gg.WPerpNS(k=3, refresh=2), {}, set()),
    "dropout": (lambda: network(nn.ReLU(), nn.Dropout(0.5)), gg.WPerp(k=3), {}, set()),
    "batch norm": (lambda: network(nn.BatchNorm1d(8), nn.ReLU()), gg.WPerp(k=3), {"coupling": "batch"}, set()),
}


@pytest.mark.parametrize("name", RECORDED)
def test_its_steps_are_those_made_one_by_one_in_the_same_memory(name, monkeypatch):
    on_tape(monkeypatch)
    case, method, options, kinds = RECORDED[name]
    twins, places = Twins(case(), method, **options), None
    for _ in range(10):
        twins.advance()
        assert places is None or twins.places() == places
        places = twins.places()
    found = {key[0] for key in twins.step.captured}
    assert found == kinds if kinds is not None else found


@pytest.mark.parametrize(("columns", "lacking", "full"), [(3, {"step"}, KINDS), (8, set(), {"step"})])
def test_what_a_basis_lacks_is_not_recorded_over(columns, lacking, full, monkeypatch):
    """One unit is open, then all are. A recording takes a basis to be full: a search starts from it, and one of the
    whole space leaves but the gate.
    """
    on_tape(monkeypatch)
    twins = Twins(network(nn.ReLU(), outputs=9), gg.WPerp(k=columns, refresh=2))
    for bias, kinds in ((-100.0, lacking), (1.0, full)):
        for one in (twins.case, twins.other):
            nn.init.constant_(one.model[0].bias, bias)
            nn.init.constant_(one.model[0].bias[:1], 1.0)
        for _ in range(10):
            twins.advance()
        assert {key[0] for key in twins.step.captured} == kinds


@pytest.mark.parametrize("middle", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["dropout", "batch norm"])
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_a_compiled_step_may_be_recorded(middle, monkeypatch):
    """Its random numbers and buffers enter and leave a graph. Where compiling was refused, nothing is recorded."""
    on_tape(monkeypatch)
    monkeypatch.setattr("gradguess.compile.compiler.compiled", lambda graph, arguments: graph)
    case = network(nn.ReLU(), middle)
    forward = gg.ForwardGradient(case.model, gg.WPerp(k=3), compile=True)
    step = gg.CapturedStep(forward, torch.optim.SGD(case.model.parameters(), lr=0.05, fused=True), cross_entropy)
    for _ in range(6):
        step(case.inputs, case.targets)
    assert step.captured


def test_a_state_that_was_loaded_comes_into_the_memory_of_the_old_one(monkeypatch):
    on_tape(monkeypatch)
    twins = Twins(make("relu-bias"), gg.WPerp(k=3))
    twins.advance()
    basis, places = twins.forward.kept["0"]["basis"], twins.places()
    loaded = {key: value + 1 if key == "cache/0/basis" else value for key, value in twins.forward.state_dict().items()}
    for forward in (twins.forward, twins.plain):
        forward.load_state_dict(loaded)
    assert twins.forward.kept["0"]["basis"] is not basis
    twins.advance()
    assert twins.places() == places


def test_nan_is_not_looked_for_and_the_choice_of_the_caller_stays(monkeypatch):
    on_tape(monkeypatch)
    twins = Twins(make("relu-bias"), gg.ActivationPerturbation(), nonfinite="raise")
    assert not twins.step(twins.case.inputs * float("nan"), twins.case.targets).isfinite()
    assert twins.forward.nonfinite == "raise"
    assert twins.forward.state == State(count=1)


REFUSED = {
    "a CPU": ({}, torch.optim.AdamW, {"capturable": True}, "CapturedStep needs a model on CUDA"),
    "replay": ({"memory": "replay"}, torch.optim.AdamW, {"capturable": True}, "memory='store'"),
    "chunks": ({"chunk": 2}, torch.optim.AdamW, {"capturable": True}, "chunk=None"),
    "an optimiser on the host": ({}, torch.optim.AdamW, {}, "capturable=True"),
    "a rate on the host": ({}, torch.optim.SGD, {"lr": torch.tensor(0.1), "foreach": False}, "fused=True"),
    "nothing": ({}, torch.optim.SGD, {"lr": 0.1, "fused": True}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name, monkeypatch):
    if name != "a CPU":
        monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    options, optimiser, chosen, message = REFUSED[name]
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, gg.WPerp(k=3), **options)
    with pytest.raises(gg.InputError, match=message) if message else nullcontext():
        gg.CapturedStep(forward, optimiser(case.model.parameters(), **chosen), case.loss_fn)
