"""What a guess is shown, however a model is run; and what a pass leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from combinations import pairwise
from gradguess.guesses import Guess, Identity, SiteView
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Layout
from gradguess.model.task import Task
from models import CLASSES, INPUTS, Case, Net, cross_entropy, generator, make

WIDTH, BATCH = 7, 6


def layers(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [
        nn.Linear(INPUTS, WIDTH),
        activation(),
        nn.Linear(WIDTH, 5),
        activation(),
        nn.Linear(5, WIDTH),
        activation(),
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)).double()


def in_place() -> nn.Module:
    return nn.ReLU(inplace=True)


def task_of(model: nn.Module) -> Task:
    source = generator(1)
    x = torch.randn(BATCH, INPUTS, generator=source, dtype=torch.float64)
    return Task(model, cross_entropy, x, torch.randint(CLASSES, (BATCH,), generator=source))


# --- what a guess sees ---------------------------------------------------------------------------------------


class Spy(Guess):
    """White noise; keeps what it is shown."""

    reads, searches, refresh = "never", True, 1

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Tensor]] = []

    def note(self, what: str, view: SiteView) -> None:
        self.seen.append((what, view.name, view.output.clone()))

    def search(self, view: SiteView) -> dict[str, Tensor]:
        self.note("search", view)
        return {}

    def frame(self, view: SiteView) -> Identity:
        self.note("frame", view)
        return Identity(view.output)


class ReadsW(Spy):
    reads = "frame"

    def frame(self, view: SiteView) -> Identity:
        view.W.matrix()
        self.note("frame", view)
        return Identity(view.output)


def hooked() -> nn.Module:
    model = layers(in_place)
    model[0].register_forward_hook(lambda module, args, output: None)
    return model


def branch() -> nn.Module:
    """ReLUs in place in a branch: no closed form."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x).relu_()
        return m.head(x + m.down(m.up(x).relu_()).relu_())

    torch.manual_seed(0)
    parts = {"stem": nn.Linear(INPUTS, WIDTH), "up": nn.Linear(WIDTH, 5), "down": nn.Linear(5, WIDTH)}
    return Net(run, **parts, head=nn.Linear(WIDTH, CLASSES)).double()


SHOWN: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "in-place": lambda: layers(in_place),
    "hooked": hooked,
    "branch": branch,
}


def outputs_of(model: nn.Module, layout: Layout, x: Tensor) -> dict[str, Tensor]:
    """`s` of every site, before anything is done to it."""
    found: dict[str, Tensor] = {}
    by_module = {site.module: site.name for site in layout.sites}

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        found[by_module[module]] = output.detach().clone()

    handles = [module.register_forward_hook(note) for module in by_module]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def _estimate(guess: Guess, task: Task) -> None:
    gg.estimate(task.model, guess, task.loss_fn, task.inputs, task.targets, sites="leaf")


def _diagnose(guess: Guess, task: Task) -> None:
    gg.diagnose(task.model, guess, task.loss_fn, task.inputs, task.targets, sites="leaf")


def _steps(**options: Any) -> Callable[[Guess, Task], None]:
    def run(guess: Guess, task: Task) -> None:
        forward = gg.ForwardGradient(task.model, guess, sites="leaf", **options)
        for _ in range(2):
            forward(task.loss_fn, task.inputs, task.targets)

    return run


def _feedback(memory: str, form: str) -> Callable[[Guess, Task], None]:
    def run(guess: Guess, task: Task) -> None:
        forward = gg.ForwardGradient(task.model, gg.Feedback(guess, form=form), sites="leaf", memory=memory)
        for _ in range(2):
            forward(task.loss_fn, task.inputs, task.targets)

    return run


WAYS: dict[str, Callable[[Guess, Task], None]] = {
    "estimate": _estimate,
    "diagnose": _diagnose,
    "store": _steps(),
    "replay": _steps(memory="replay"),
    "tangents, replay": _steps(memory="replay", tangents=2),
    "isolate": _steps(isolate=True),
    "balance": _steps(balance=True),
    "chained": _feedback("store", "chained"),
    "direct": _feedback("store", "direct"),
    "direct, replay": _feedback("replay", "direct"),
}


@pytest.mark.parametrize(("way", "model", "kind"), pairwise(WAYS, SHOWN, [Spy, ReadsW]))
def test_a_guess_sees_the_output_before_the_relu(model, kind, way):
    task, guess = task_of(SHOWN[model]()), kind()
    layout = lay_out(task, "leaf")
    truth = outputs_of(task.model, layout, task.inputs)
    WAYS[way](guess, task)
    shown = [site.name for site in layout.guessed]  # not the model's own output
    assert len(shown) == len(truth) - 1
    assert {(what, name) for what, name, _ in guess.seen} == {(w, n) for w in ("search", "frame") for n in shown}
    assert any((s < 0).any() for _, _, s in guess.seen)
    for what, name, s in guess.seen:
        assert torch.equal(s, truth[name][: len(s)]), f"{what} at {name}"


# --- what a pass leaves behind -------------------------------------------------------------------------------

METHODS = {
    "activation": gg.ActivationPerturbation(),
    "wt": gg.WTranspose(),
    "wperp": gg.WPerp(k=3),
    "chained": gg.Feedback(gg.WPerp(k=3)),
    "direct": gg.Feedback(gg.WPerp(k=3), form="direct"),
    "backprop": gg.Backprop(),
}


def batches_alive(rows: int) -> int:
    return sum(type(item) is Tensor and item.dim() > 1 and len(item) == rows for item in gc.get_objects())


@pytest.mark.parametrize(
    ("method", "name", "memory"),
    pairwise(METHODS, ["relu-bias", "gelu-bias", "residual", "dropout"], ["store", "replay"]),
)
def test_what_a_step_saw_is_freed_when_it_ends(name, method, memory):
    """Without waiting for the garbage collector: on a GPU the next step would not find the memory."""
    if (method, memory, name) == ("chained", "replay", "residual"):
        pytest.skip("refused")
    case, rows = make(name), 23
    x, t = torch.randn(rows, INPUTS, dtype=torch.float64), torch.randint(CLASSES, (rows,))
    large = Case(case.model, x, t)
    forward = gg.ForwardGradient(case.model, METHODS[method], memory=memory)
    forward(*large.args)
    gc.collect()
    gc.disable()
    try:
        before = batches_alive(rows)
        forward(*large.args)
        assert batches_alive(rows) == before
    finally:
        gc.enable()
