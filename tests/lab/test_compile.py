"""`--compile`: what a compiled run is, how it resumes, and what the user is told where it cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import gradguess as gg
from gradguess.compile import compiler
from gradguess_lab import checkpoint
from gradguess_lab.compiled_backprop import CompiledBackprop, losses
from gradguess_lab.config import TrainConfig
from gradguess_lab.data import Shape
from gradguess_lab.loss import per_sample_loss, smoothed_loss
from gradguess_lab.networks import build
from gradguess_lab.train import train
from traced_graphs import as_compiled

pytest.importorskip("mnist1d")
pytest.importorskip("safetensors")


@pytest.fixture
def graphs_alone(monkeypatch):
    """Graphs are traced, and run as they are: compiling them takes seconds each."""
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def mlp() -> torch.nn.Module:
    shape = Shape("signal", (40,), 10)
    return build("mlp", shape, 8, 2, False, "relu", torch.Generator().manual_seed(0)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(12, 40, generator=source).double(), torch.randint(10, (12,), generator=source)


@pytest.mark.parametrize("method", ["backprop", "feedback-chained"])
def test_a_compiled_run_goes_on_where_it_was_interrupted(
    method, small: TrainConfig, out: Path, tmp_path: Path, graphs_alone
):
    """Equal up to rounding: in each process the first step of each kind runs uncompiled."""
    config = dataclasses.replace(small, method=method, compile=True, dtype="float64")
    train(dataclasses.replace(config, compile=False), tmp_path / "plain")
    train(config, tmp_path / "unbroken")

    class Stop(Exception):
        pass

    def stop(row: dict) -> None:
        if row["epoch"] == 3:
            raise Stop

    with pytest.raises(Stop):
        train(config, out, on_epoch=stop)
    train(config, out)
    found, *others = (checkpoint.load(path) for path in (out, tmp_path / "unbroken", tmp_path / "plain"))
    assert found is not None
    for other in others:
        assert other is not None
        assert found[0].keys() == other[0].keys()
        for name in found[0].keys() - {"forward/method"}:  # compiled backpropagation has a name of its own
            torch.testing.assert_close(found[0][name], other[0][name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_backprop_is_backprop(smoothing: float):
    loss = smoothed_loss(smoothing)
    model, (x, y) = mlp(), batch()
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(2)))
    found = [gg.estimate(model, method, loss, x, y) for method in (gg.Backprop(), CompiledBackprop(losses))]
    torch.testing.assert_close(found[0].loss, found[1].loss)
    torch.testing.assert_close(found[0].losses, found[1].losses)
    torch.testing.assert_close(found[0].grads, found[1].grads)


def test_without_a_compiler_backprop_says_so_once_and_goes_on():
    def fails(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no g++\nat line 1")

    model, (x, y) = mlp(), batch()
    forward = gg.ForwardGradient(model, CompiledBackprop(fails))
    with pytest.warns(UserWarning, match=r"compile=True has no effect. torch.compile: no g\+\+ Steps"):
        forward(per_sample_loss, x, y)
    forward(per_sample_loss, x, y)  # a second warning would be an error
    expected = torch.autograd.grad(per_sample_loss(model(x), y).mean(), list(model.parameters()))
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
