"""`gg.CapturedStep` without a GPU: what it refuses, and how a state is taken over in the memory of the one before."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_same
from gradguess import captured_step
from gradguess.backends.cuda_graphs import CannotRecord
from gradguess.captured_step import _replaced, _write_into
from gradguess.step.base import State
from models import make

Entries = dict[str, dict[str, Tensor]]


def entries(fill: float, shape: tuple[int, ...] = (3, 2), dtype: torch.dtype = torch.float64) -> Entries:
    return {
        "a": {"basis": torch.full(shape, fill, dtype=dtype)},
        "b": {"B": torch.full((4,), fill), "v": torch.ones(2)},
    }


@pytest.mark.parametrize("new", [entries(2, (3, 4)), entries(2, (2,)), entries(2, dtype=torch.float32)])
def test_a_tensor_of_another_shape_or_dtype_is_a_new_one(new):
    old = entries(1)
    found = _write_into(old, new)
    assert found["a"]["basis"] is new["a"]["basis"]
    assert found["b"]["B"] is old["b"]["B"]
    assert torch.equal(old["a"]["basis"], entries(1)["a"]["basis"])  # nothing is broadcast into it
    assert_same(found, new)
    assert _replaced(old, found)  # recordings must be made again


def captured(forward: gg.ForwardGradient, monkeypatch: pytest.MonkeyPatch, **options) -> gg.CapturedStep:
    """On a CPU nothing is recorded; every step is made by itself."""
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "WARM_UP", 1000)
    optimiser = torch.optim.AdamW(forward.model.parameters(), lr=0.05, capturable=True, foreach=False, **options)
    monkeypatch.setattr(optimiser, "step", torch.optim.SGD(forward.model.parameters(), lr=0.05).step)
    return gg.CapturedStep(forward, optimiser, nn.CrossEntropyLoss(reduction="none"))


class Twins:
    """A captured step, and the same steps made one by one on a copy of the model."""

    def __init__(self, network: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case, self.other = make(network), make(network)
        self.forward = gg.ForwardGradient(self.case.model, method)
        self.plain = gg.ForwardGradient(self.other.model, method)
        self.step = captured(self.forward, monkeypatch)
        self.step.loss_fn = self.case.loss_fn
        self.optimiser = torch.optim.SGD(self.other.model.parameters(), lr=0.05)

    def advance(self) -> None:
        """Both make a step, with the same result."""
        self.optimiser.zero_grad()
        expected = self.plain(*self.other.args)
        self.optimiser.step()
        assert torch.equal(self.step(self.case.inputs, self.case.targets), expected)
        assert self.forward.steps == self.plain.steps
        assert_same({**self.forward.kept}, {**self.plain.kept})
        assert_same({**self.forward.learned}, {**self.plain.learned})


@pytest.mark.parametrize(
    "method", [gg.WPerp(k=3, refresh=2), gg.WPerpNS(k=3, refresh=2), gg.Feedback(gg.WPerp(k=3, refresh=2))], ids=repr
)
def test_its_steps_are_those_made_one_by_one_in_the_same_memory(method, monkeypatch):
    twins = Twins("relu-bias", method, monkeypatch)
    pointers = None
    for _ in range(5):
        twins.advance()
        assert twins.step.state is twins.forward.state
        found = {
            (kind, site, key): value.data_ptr()
            for kind in ("kept", "learned")
            for site, values in getattr(twins.forward.state, kind).items()
            for key, value in values.items()
        }
        assert pointers is None or found == pointers
        pointers = found
    assert_same(dict(twins.case.model.named_parameters()), dict(twins.other.model.named_parameters()))


def test_a_search_that_is_replayed_draws_what_it_would_draw_by_itself(monkeypatch):
    """In place of a recording its function is called; as in a graph, no generator is seeded and nothing counted."""
    twins = Twins("transformer", gg.WPerp(k=3, refresh=2), monkeypatch)
    forward, step = twins.forward, twins.step

    class Called:
        def __init__(self, function, *generators, beside):
            self.function = function
            assert generators == (forward.generator, forward.plan.sketching)
            assert beside is next((one.recording for one in step.captured.values()), None)  # all share one memory

        def replay(self):
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr("gradguess.noise.recording", lambda: True)
                loss = self.function()
            step.state = forward.state = replace(forward.state, count=forward.state.count - 1)
            return loss

    monkeypatch.setattr(captured_step, "WARM_UP", 1)
    monkeypatch.setattr(captured_step, "Recording", Called)
    for _ in range(8):
        twins.advance()
    assert {key[0] for key in step.captured} == {"refresh", "step"}


def test_a_kind_that_cannot_be_recorded_runs_by_itself_and_is_tried_once(monkeypatch):
    twins = Twins("transformer", gg.WPerp(k=3, refresh=2), monkeypatch)
    forward, step = twins.forward, twins.step
    tried = []

    def record(function, *generators, beside):
        tried.append(forward.steps)
        step._settle(replace(step.state, count=step.state.count + 1))  # as a step does
        raise CannotRecord

    monkeypatch.setattr(captured_step, "WARM_UP", 1)
    monkeypatch.setattr(captured_step, "Recording", record)
    for _ in range(8):
        twins.advance()
    assert tried == [3, 4]  # a step and a search
    assert not step.captured


@pytest.mark.parametrize(
    ("columns", "lacks", "alone"),
    [(3, False, set()), (3, True, {"refresh"}), (8, False, set()), (8, True, {"refresh", "step"})],
)
def test_what_a_basis_lacks_is_not_recorded_over(columns, lacks, alone, monkeypatch):
    """A recording takes a basis to be full: a search starts from it, and one of the whole space leaves but the gate."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    step = captured(gg.ForwardGradient(model, gg.WPerp(k=columns, refresh=2)), monkeypatch)
    data = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    monkeypatch.setattr(captured_step, "WARM_UP", 0)
    for _ in range(2):
        step.forward(step.loss_fn, *data)
    step._settle(step.forward.state)
    basis = step.state.kept["0"]["basis"].copy_(torch.eye(8)[:, :columns])
    basis[:, -1] *= not lacks
    step._full = None  # as after a search
    for kind in ("refresh", "step"):
        recorded: list[str] = []
        monkeypatch.setattr(step, "_capture", lambda *_, kind=kind, recorded=recorded: recorded.append(kind))
        step._recorded(kind, *data)
        assert bool(recorded) == (kind not in alone)


class Recorded(Exception):
    """In place of a recording."""


DROPOUT = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
BATCH_NORM = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
PLAIN = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
SOFTMAX = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "recorded"),
    [(PLAIN, [0, 1, 1]), (SOFTMAX, [0, 1, 1]), (DROPOUT, [0, 0, 0]), (BATCH_NORM, [0, 0, 0])],
    ids=["plain", "sketched", "dropout", "batch norm"],
)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_what_would_not_be_the_same_again_is_not_recorded(model, recorded, monkeypatch):
    """Nor is the first step, which finds the sites. The third one searches for a basis."""

    def record(function, *generators, beside):
        raise Recorded

    step = captured(gg.ForwardGradient(model, gg.WPerp(k=3, refresh=2)), monkeypatch)
    monkeypatch.setattr(captured_step, "WARM_UP", 0)
    monkeypatch.setattr(captured_step, "Recording", record)
    seen = []
    for _ in recorded:
        before = step.state
        try:
            step(torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0]))
            seen.append(0)
        except Recorded:
            seen.append(1)
            step._step(torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0]))
        assert step.state.count == before.count + 1
    assert seen == recorded


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM], ids=["dropout", "batch norm"])
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_a_compiled_step_may_be_recorded(model, monkeypatch):
    """Its random numbers and buffers enter and leave a graph. Where compiling was refused, nothing is recorded."""
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=True)
    step = captured(forward, monkeypatch)
    monkeypatch.setattr("gradguess.methods.compiled.compiled", lambda graph, arguments: graph)
    for _ in range(3):
        step(torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0]))
    assert not step._is_fragile("step")
    forward.plan.runner.refused = True
    assert step._is_fragile("step")


def test_a_state_that_was_loaded_comes_into_the_memory_of_the_old_one(monkeypatch):
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, gg.WPerp(k=3))
    step = captured(forward, monkeypatch)
    step(case.inputs, case.targets)
    basis = forward.kept["0"]["basis"]
    loaded = {key: value + 1 if key == "cache/0/basis" else value for key, value in forward.state_dict().items()}
    wanted = loaded["cache/0/basis"].clone()
    forward.load_state_dict(loaded)
    assert forward.kept["0"]["basis"] is not basis
    step(case.inputs, case.targets)
    assert forward.kept["0"]["basis"] is basis
    assert torch.equal(basis, wanted)


def test_nan_is_not_looked_for_and_the_choice_of_the_caller_stays(monkeypatch):
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, gg.ActivationPerturbation(), nonfinite="raise")
    step = captured(forward, monkeypatch)
    assert not step(case.inputs * float("nan"), case.targets).isfinite()
    assert forward.nonfinite == "raise"
    assert forward.state == State(count=1)


def test_a_model_on_a_cpu_is_refused():
    case = make("relu-bias")
    optimiser = torch.optim.AdamW(case.model.parameters(), capturable=True)
    with pytest.raises(gg.InputError, match="CapturedStep needs a model on CUDA"):
        gg.CapturedStep(gg.ForwardGradient(case.model, gg.WPerp(k=3)), optimiser, case.loss_fn)


@pytest.mark.parametrize(
    ("options", "capturable", "message"),
    [
        ({"memory": "replay"}, True, "memory='store'"),
        ({"chunk": 2}, True, "chunk=None"),
        ({}, False, "capturable=True"),
    ],
)
def test_what_cannot_be_captured_is_refused(options, capturable, message, monkeypatch):
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    case = make("relu-bias")
    optimiser = torch.optim.AdamW(case.model.parameters(), capturable=capturable)
    with pytest.raises(gg.InputError, match=message):
        gg.CapturedStep(gg.ForwardGradient(case.model, gg.WPerp(k=3), **options), optimiser, case.loss_fn)


@pytest.mark.parametrize(("fused", "tensor", "fine"), [(True, True, True), (True, False, True), (False, True, False)])
def test_sgd_is_captured_if_its_rate_can_change_on_the_device(fused: bool, tensor: bool, fine: bool, monkeypatch):
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    case = make("relu-bias")
    lr = torch.tensor(0.1) if tensor else 0.1
    optimiser = torch.optim.SGD(case.model.parameters(), lr, foreach=False, fused=fused)
    with nullcontext() if fine else pytest.raises(gg.InputError, match="fused=True"):
        gg.CapturedStep(gg.ForwardGradient(case.model, gg.WPerp(k=3)), optimiser, case.loss_fn)
