"""What changes between two steps acts on compiled and on captured ones: they are the steps that are made one by one.

A captured step is recorded on a tape, a compiled one stays a graph; what comes back finds its recording or graph again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess import captured_step
from gradguess.compile import compiler
from gradguess.compile.signature import Signatures
from gradguess.model.task import Task
from tape import on_tape
from traced_graphs import as_compiled

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
SCALE, TABLE = 1.0, {"gain": 1.0}
SETTINGS = ModuleType("settings")
SETTINGS.bias = 0.0  # type: ignore[attr-defined]


def doubled(x: Tensor) -> Tensor:
    return 2 * x * TABLE["gain"]


class Options:
    power = 1.0


class Model(nn.Module):
    """It reads attributes, lists, configurations, classes, globals and helpers."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = nn.Linear(5, 8), nn.Linear(8, 3)
        self.factor, self.factors = 1.0, [1.0]
        self.config = SimpleNamespace(gain=1.0, inner=SimpleNamespace(gain=1.0))
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.low(x)) * self.factor * self.factors[0] * self.config.gain
        h = doubled(h) * self.config.inner.gain + SETTINGS.bias  # type: ignore[attr-defined]
        return self.high(h * self.slope * Options.power) * SCALE


class Run:
    """A training loop whose steps are "plain", "compiled" or "captured"."""

    def __init__(self, how: str, lr: float = 2**-6, **options: Any) -> None:
        self.model, self.accumulate, self.options = Model().double(), options.get("accumulate", 1), options
        self.forward = gg.ForwardGradient(self.model, gg.WTranspose(), compile=how == "compiled")
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, fused=True)
        self.loss_fn: Any = CROSS_ENTROPY
        self.step: Any = gg.CapturedStep(self.forward, self.optimiser, CROSS_ENTROPY, **options)
        self.step = self.step if how == "captured" else None
        self.generator, self.calls = torch.Generator().manual_seed(1), 0

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

    def is_ready(self) -> bool:
        """Whether the steps are recorded, or compiled."""
        if self.step is not None:
            return bool(self.step.captured)
        runner = self.forward.plan.runner
        return bool(runner._graphs) and not runner.refused


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    on_tape(monkeypatch)
    monkeypatch.setattr(compiler, "compiled", as_compiled)


Change = Callable[[Run, pytest.MonkeyPatch], Any]


def compare(how: str, change: Change, steps: int = 8, **options: Any) -> Run:
    """Steps before a change and after it, plain and not; the run that is not."""
    runs, losses = [Run(kind, **options) for kind in ("plain", how)], []
    for run in runs:
        with pytest.MonkeyPatch.context() as patch:
            before = torch.get_default_dtype()
            seen = [run.advance() for _ in range(steps)]
            assert run is runs[0] or run.is_ready()
            change(run, patch)
            try:
                losses.append(seen + [run.advance() for _ in range(steps)])
            finally:
                torch.set_default_dtype(before)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    torch.testing.assert_close(runs[1].weights(), runs[0].weights(), rtol=1e-9, atol=1e-12)
    assert runs[1].is_ready()
    return runs[1]


def smoothed(weight: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return CROSS_ENTROPY(outputs, targets) * weight


def of_closure(weight: float) -> Any:
    return lambda outputs, targets: CROSS_ENTROPY(outputs, targets) * weight


def hook(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.model.low.register_forward_hook(lambda module, args, output: 2 * output)


def elsewhere(run: Run, patch: pytest.MonkeyPatch) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


CHANGES: dict[str, Change] = {
    "attribute": lambda run, patch: setattr(run.model, "factor", 2.0),
    "list": lambda run, patch: run.model.factors.__setitem__(0, 2.0),
    "configuration": lambda run, patch: setattr(run.model.config, "gain", 2.0),
    "inner configuration": lambda run, patch: setattr(run.model.config.inner, "gain", 2.0),
    "function": lambda run, patch: setattr(run.model, "act", torch.tanh),
    "class attribute": lambda run, patch: patch.setattr(Model, "slope", 2.0),
    "attribute of a class": lambda run, patch: patch.setattr(Options, "power", 2.0),
    "attribute over that of the class": lambda run, patch: setattr(run.model, "slope", 2.0),
    "global": lambda run, patch: patch.setitem(globals(), "SCALE", 2.0),
    "global of a helper": lambda run, patch: patch.setitem(TABLE, "gain", 2.0),
    "helper": lambda run, patch: patch.setitem(globals(), "doubled", lambda x: 3 * x),
    "module of settings": lambda run, patch: patch.setattr(SETTINGS, "bias", 0.5),
    "loss": lambda run, patch: setattr(run, "loss_fn", nn.CrossEntropyLoss(reduction="none", label_smoothing=0.3)),
    "closure of the loss": lambda run, patch: setattr(run, "loss_fn", of_closure(2.0)),
    "partial": lambda run, patch: setattr(run, "loss_fn", partial(smoothed, 2.0)),
    "default dtype": lambda run, patch: torch.set_default_dtype(torch.float64),
    "a frozen parameter": lambda run, patch: run.model.low.weight.requires_grad_(False),
    "a hook": hook,
    "evaluation mode": lambda run, patch: run.model.eval(),
    "weights lie elsewhere": elsewhere,
    "nothing": lambda run, patch: None,
}
OF_THE_OPTIMISER: dict[str, Change] = {
    **{
        f"{name} = {value}": lambda run, patch, name=name, value=value: run.optimiser.param_groups[0].update(
            {name: value}
        )
        for name, value in (("lr", 0.0), ("lr", torch.tensor(2**-6)), ("weight_decay", 0.1), ("momentum", 0.5))
    },
    "loaded": lambda run, patch: run.optimiser.load_state_dict(copy.deepcopy(run.optimiser.state_dict())),
}


@pytest.mark.parametrize("how", ["compiled", "captured"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts(name, how):
    compare(how, CHANGES[name])


@pytest.mark.parametrize("name", OF_THE_OPTIMISER)
def test_a_change_of_the_optimiser_acts_on_captured_steps(name):
    compare("captured", OF_THE_OPTIMISER[name])


@pytest.mark.parametrize("options", [{"clip": 0.05}, {"accumulate": 3}, {"accumulate": 2, "clip": 0.05}], ids=str)
def test_clipping_and_accumulation(options):
    run = compare("captured", lambda run, patch: None, steps=12, **options)
    assert len(run.step.captured) == min(options.get("accumulate", 1), 3)


def test_freezing_to_and_fro_keeps_both_graphs():
    runs = [Run("plain"), Run("compiled")]
    for i in range(40):
        for run in runs:
            run.model.low.weight.requires_grad_(i % 2 == 0)
        expected, found = (run.advance() for run in runs)
        assert found == pytest.approx(expected, rel=1e-9)
    assert len(runs[1].forward.plan.runner._graphs) == 2


def test_a_recurrent_layer_whose_weights_were_moved_is_the_same():
    """PyTorch lists its weights anew whenever other tensors take their place, as in a tangent pass along weights."""
    model, x, targets = nn.GRU(4, 3, batch_first=True), torch.randn(2, 5, 4), torch.zeros(2)
    task = Task(model, lambda out, t: out[0].square().mean((1, 2)), x, targets)
    forward, signatures, keys = gg.ForwardGradient(model, gg.WeightPerturbation()), Signatures(), set()
    for _ in range(2):
        forward(task.loss_fn, x, targets)
        assert forward.layout is not None
        keys.add(signatures.of_step(task, forward.layout))
    assert len(keys) == 1


def test_a_loss_that_is_made_anew_at_every_step_finds_its_graph():
    run = Run("compiled", lr=0.0)
    for _ in range(70):
        run.loss_fn = of_closure(2.0)
        run.advance()
    assert len(run.forward.plan.runner._graphs) == 1


@pytest.mark.parametrize(("how", "module"), [("compiled", compiler), ("captured", captured_step)])
def test_what_changes_at_every_step_is_told_once(how, module, monkeypatch):
    monkeypatch.setattr(module, "MOST", 5)
    run = Run(how, lr=0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(12):
            run.model.factor = 1.0 + i
            run.advance()
    assert len(told) == 1
    assert "'factor' of Model" in str(told[0].message)
    assert run.forward.steps == 12


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_act_without_new_recordings(early):
    losses = []
    for how in ("plain", "captured"):
        run = Run(how)
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


@pytest.mark.parametrize(
    ("options", "message"), [({"clip": 0.0}, "clip: expected a positive"), ({"accumulate": 0}, "accumulate: expected")]
)
def test_options_are_checked(options, message):
    with pytest.raises(gg.InputError, match=message):
        Run("captured", **options)
