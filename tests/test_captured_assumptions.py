"""What changes between two steps acts on captured ones: they are the steps that are made one by one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess import captured_step
from tape import on_tape

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
SCALE = 1.0


class Net(nn.Module):
    """It reads an attribute, a configuration, a class attribute and a global."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = nn.Linear(5, 8), nn.Linear(8, 3)
        self.factor, self.config = 1.0, SimpleNamespace(gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(torch.relu(self.low(x)) * self.factor * self.config.gain * self.slope) * SCALE


class Run:
    """A training loop, captured or not."""

    def __init__(self, captured: bool, method: Any = None, **options: Any) -> None:
        self.model, self.accumulate = Net().double(), options.get("accumulate", 1)
        self.forward = gg.ForwardGradient(self.model, method or gg.WTranspose())
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=2**-5, momentum=0.9, fused=True)
        self.loss_fn: Any = CROSS_ENTROPY
        self.options = options
        self.step = gg.CapturedStep(self.forward, self.optimiser, CROSS_ENTROPY, **options) if captured else None
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0

    def advance(self) -> float:
        x = torch.randn(6, 5, generator=self.generator, dtype=torch.float64)
        t = torch.randint(3, (6,), generator=self.generator)
        if self.step is not None:
            self.step.loss_fn = self.loss_fn
            return float(self.step(x, t))
        if self.calls % self.accumulate == 0:
            self.optimiser.zero_grad()
        loss = self.forward(self.loss_fn, x, t)
        self.calls += 1
        if self.calls % self.accumulate == 0:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad /= self.accumulate
            if "clip" in self.options:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip"])
            self.optimiser.step()
        return float(loss)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def compare(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], None], steps: int = 12, **options: Any) -> Run:
    """Steps before a change and after it, captured and not; the captured run."""
    on_tape(monkeypatch)
    runs = [Run(captured, **options) for captured in (False, True)]
    losses: list[list[float]] = [[], []]
    for run, seen in zip(runs, losses, strict=True):
        with monkeypatch.context() as inside:
            run.patch = inside  # type: ignore[attr-defined]
            seen += [run.advance() for _ in range(steps)]
            if run.step is not None:
                assert run.step.captured, "nothing was recorded"
            change(run)
            seen += [run.advance() for _ in range(steps)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    torch.testing.assert_close(runs[1].weights(), runs[0].weights(), rtol=1e-9, atol=1e-12)
    assert runs[1].step is not None
    assert runs[1].step.captured, "nothing was recorded after the change"
    return runs[1]


def group(name: str, value: Any) -> Callable[[Run], None]:
    return lambda run: run.optimiser.param_groups[0].update({name: value})


def attribute(path: str, value: Any) -> Callable[[Run], None]:
    *owners, name = path.split(".")

    def change(run: Run) -> None:
        thing: Any = run.model
        for owner in owners:
            thing = getattr(thing, owner)
        setattr(thing, name, value)

    return change


def hook(run: Run) -> None:
    run.model.low.register_forward_hook(lambda module, args, output: 2 * output)


def memory(run: Run) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


def momentum(run: Run) -> None:
    run.optimiser.load_state_dict(copy.deepcopy(run.optimiser.state_dict()))


def another_loss(run: Run) -> None:
    run.loss_fn = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.3)


CHANGES = {
    "the rate is a number": group("lr", 0.0),
    "the rate is another tensor": group("lr", torch.tensor(2**-6)),
    "weight decay": group("weight_decay", 0.1),
    "momentum": group("momentum", 0.5),
    "a frozen parameter": lambda run: run.model.low.weight.requires_grad_(False),
    "an attribute": attribute("factor", 2.0),
    "a configuration": attribute("config.gain", 0.5),
    "an attribute over that of the class": attribute("slope", 0.5),
    "a class attribute": lambda run: run.patch.setattr(Net, "slope", 0.5),  # type: ignore[attr-defined]
    "a global": lambda run: run.patch.setitem(globals(), "SCALE", 0.5),  # type: ignore[attr-defined]
    "a hook": hook,
    "evaluation mode": lambda run: run.model.eval(),
    "weights lie elsewhere": memory,
    "a loaded optimiser": momentum,
    "another loss": another_loss,
    "nothing": lambda run: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts(name, monkeypatch):
    compare(monkeypatch, CHANGES[name])


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_act_without_new_recordings(early, monkeypatch):
    on_tape(monkeypatch)
    losses = []
    for captured in (False, True):
        run = Run(captured)
        scheduler, seen = None, []
        for i in range(20):
            if i == (0 if early else 8):
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimiser, 20)
            seen.append(run.advance())
            if scheduler is not None:
                scheduler.step()
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # rates are in single precision
    assert len(run.step.captured) == 1


@pytest.mark.parametrize("options", [{"clip": 0.05}, {"accumulate": 3}, {"accumulate": 2, "clip": 0.05}], ids=str)
def test_clipping_and_accumulation(options, monkeypatch):
    run = compare(monkeypatch, lambda run: None, **options)
    assert len(run.step.captured) == min(options.get("accumulate", 1), 3)


def test_what_changes_at_every_step_is_told_once(monkeypatch):
    on_tape(monkeypatch)
    monkeypatch.setattr(captured_step, "MOST", 5)
    run = Run(True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(12):
            run.model.factor = 1.0 + i
            run.advance()
    assert len(told) == 1
    assert "'factor' of Net" in str(told[0].message)
    assert run.forward.steps == 12


@pytest.mark.parametrize(
    ("options", "message"), [({"clip": 0.0}, "clip: expected a positive"), ({"accumulate": 0}, "accumulate: expected")]
)
def test_options_are_checked(options, message, monkeypatch):
    on_tape(monkeypatch)
    with pytest.raises(gg.InputError, match=message):
        Run(True, **options)
