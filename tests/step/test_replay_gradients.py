"""With `memory="replay"` a gradient goes into `.grad` as it is made, after losses and derivatives were looked at."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.meter import peak_bytes

CPU, WIDTH, CLASSES, ROWS = torch.device("cpu"), 256, 3, 4
loss_fn = nn.CrossEntropyLoss(reduction="none")


class Scaled(nn.Module):
    """A layer whose gradient has no closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def chain(depth: int, *, closed: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()] if closed else [Scaled()] for _ in range(depth)]
    return nn.Sequential(*(layer for some in layers for layer in some), nn.Linear(WIDTH, CLASSES, bias=False))


def stepping(model: nn.Module, method: str, **options: Any) -> gg.ForwardGradient:
    sites = len(model) // 2 if "students" in method else "auto"
    return gg.ForwardGradient(model, METHODS[method], **{"memory": "replay", "sites": sites, **options})


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))


def narrow(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    return nn.Linear(*shape, *outputs)


SHARED = gg.WPerp(refresh=1000)
METHODS = {
    "wperp": SHARED,
    "searches": gg.WPerp(refresh=1),
    "activation": gg.ActivationPerturbation(),
    "weight": gg.WeightPerturbation(),
    "direct": gg.Feedback(SHARED, form="direct"),
    "chained": gg.Feedback(SHARED),
    "corrected": gg.Feedback(SHARED, form="corrected"),
    "students": gg.Students(narrow),
    "students, error": gg.Students(narrow, signal="error"),
}


# --- memory --------------------------------------------------------------------------------------------------


def peak(method: str, depth: int, closed: bool, **options: Any) -> int:
    """The peak of a step above what there was before it, `.grad` included."""
    forward = stepping(chain(depth, closed=closed), method, **options)
    x, t = batch()
    forward(loss_fn, x, t)
    found = peak_bytes(lambda: forward(loss_fn, x, t), CPU)
    assert found is not None
    return found


def grown(method: str, closed: bool = True, **options: Any) -> float:
    """What a layer more takes, in weights of a layer."""
    return (peak(method, 24, closed, **options) - peak(method, 8, closed, **options)) / (16 * 4 * WIDTH**2)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "graph"])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_more_takes_no_memory_above_its_gradient(method, closed):
    """But for weight perturbation, whose tangent pass has the directions of all weights at once."""
    assert grown(method, closed) < 0.05 + (method == "weight")


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_store_keeps_an_input_and_a_direction_for_each_layer(activation):
    """And no tangent, whether dual numbers or a closed form carried it."""
    found, (x, t) = [], (torch.randn(2048, 32), torch.randint(CLASSES, (2048,)))
    for depth in (4, 12):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32, bias=False), activation())]
        forward = gg.ForwardGradient(nn.Sequential(*layers, nn.Linear(32, CLASSES)), gg.ActivationPerturbation())
        forward(loss_fn, x, t)
        found.append(peak_bytes(lambda forward=forward: forward(loss_fn, x, t), CPU) / x.nbytes)
    assert (found[1] - found[0]) / 8 == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("nonfinite", "waiting"), [("ignore", 0), ("raise", 1)])
def test_chunks_wait_in_one_sum_where_the_last_may_not_be_finite(nonfinite, waiting):
    assert waiting - 0.01 < grown("wperp", chunk=2, nonfinite=nonfinite) < waiting + 0.05


# --- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"chunk": 3, "nonfinite": "ignore"}, {"tangents": 2}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_added_to_what_was_there(method, options):
    found = []
    for memory in ("store", "replay"):
        model, (x, t) = chain(4, closed=False).double(), batch()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.manual_seed(1)
        stepping(model, method, **{"memory": memory, **options})(loss_fn, x.double(), t)
        found.append([p.grad for p in model.parameters()])
    for stored, replayed in zip(*found, strict=True):
        assert not (stored == 1).all()
        torch.testing.assert_close(replayed, stored, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_not_finite_is_found_before_anything_is_written(method, nonfinite, options):
    model, (x, t) = chain(4, closed=False), batch()
    forward = stepping(model, method, nonfinite=nonfinite, **options)
    forward(loss_fn, x, t)
    before = [p.grad.clone() for p in model.parameters()]
    x[-1] = torch.nan
    with pytest.raises(gg.NonFiniteError, match="loss of 1 ") if nonfinite == "raise" else nullcontext():
        assert forward(loss_fn, x, t).isnan()
    assert forward.skipped == (nonfinite == "skip")
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


class Rooted(nn.Linear):
    """The derivative of its output with respect to a parameter of its own is infinite."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.root = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.root.sqrt()


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("method", ["wperp", "direct", "students"])
def test_a_gradient_that_is_not_finite_is_found_when_it_is_written(method, nonfinite):
    """It cannot be skipped any more."""
    model = chain(4)
    model[2] = Rooted()
    forward = stepping(model, method, nonfinite=nonfinite)
    looks = pytest.raises(gg.NonFiniteError, match=r"A gradient at step 0 is NaN or infinite.*zero_grad\(\)")
    with nullcontext() if nonfinite == "ignore" else looks:
        forward(loss_fn, *batch())
    assert (forward.steps, forward.skipped) == (1, 0)
    assert not model[2].root.grad.isfinite().all()


class Counting(nn.Module):
    """Calls its last layer but one twice in every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.below(x).relu())
        self.passes += 1
        return self.head((self.layer(x) if self.passes == 2 else x).relu())


@pytest.mark.parametrize("method", ["wperp", "direct"])
def test_calls_that_change_between_the_passes_are_an_error(method):
    model, x, t = Counting(), torch.randn(ROWS, 6), batch()[1]
    forward = stepping(model, method)
    forward(loss_fn, x, t)
    state, model.passes = forward.state_dict(), 0
    with pytest.raises(gg.InputError, match=r"other modules when memory='replay' ran it again.*zero_grad\(\)"):
        forward(loss_fn, x, t)
    assert all(torch.equal(value, state[key]) for key, value in forward.state_dict().items())
