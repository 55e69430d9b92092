"""What training runs on images add: moved images, SGD, warm-up, label smoothing, bfloat16, channels last."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gradguess_lab import checkpoint, data
from gradguess_lab.config import TrainConfig
from gradguess_lab.datasets import Arrays, Source, named
from gradguess_lab.loss import per_sample_loss, smoothed_loss
from gradguess_lab.networks import build
from gradguess_lab.recipe import REACH, build_optimiser, draw_moves, learning_rate, moved
from gradguess_lab.tasks import TASKS
from gradguess_lab.train import _Run, train
from gradguess_lab.world import World


def colours() -> Arrays:
    """48 + 16 colour images of 16 × 16 pixels, in which the brightest channel is the class.

    Not smaller: in bfloat16 on a CPU, PyTorch 2.13 returns wrong gradients of a strided convolution of 1 × 1 pixels."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, 64, "uint8")
    x = draw.integers(0, 156, (64, 3, 16, 16), "uint8")
    x[np.arange(64), y] += 99
    return named(x[:48], y[:48], x[48:], y[48:])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainConfig:
    pytest.importorskip("safetensors")
    monkeypatch.setenv("GRADGUESS_CACHE", str(tmp_path / "cache"))
    source = Source(colours, classes=3, kind="image", scale=((0.4, 0.4, 0.4), (0.2, 0.2, 0.2)))
    monkeypatch.setitem(data.DATASETS, "colours", source)
    return TrainConfig(
        data="colours",
        model="resnet18",
        width=2,
        method="backprop",
        epochs=3,
        batch=20,
        optimiser="sgd",
        lr=0.1,
        weight_decay=5e-4,
        schedule="linear",
        warmup=0.2,
        smoothing=0.1,
        augment=True,
        autocast=True,
        channels_last=True,
        eval_every=1,
    )


# --- moved images --------------------------------------------------------------------------------------------


def padded_crop(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """The slow twin: pad, cut out, mirror, one image at a time."""
    height, width = image.shape[1:]
    padded = F.pad(image[None], (REACH,) * 4, mode="reflect")[0]
    cut = padded[:, REACH - down : REACH - down + height, REACH - right : REACH - right + width]
    return cut.flip(2) if mirrored else cut


@pytest.mark.parametrize("size", [(3, 9, 12), (1, 5, 5)])
def test_moved_images_are_crops_of_padded_ones(size: tuple[int, int, int]):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, *size, dtype=torch.float64, generator=generator)
    chosen = torch.randperm(200, generator=generator)[:150]
    moves = draw_moves(150, generator)
    found = moved(x, chosen, moves)
    expected = [padded_crop(x[i], *move) for i, move in zip(chosen, moves.tolist(), strict=True)]
    assert torch.equal(found, torch.stack(expected))


def test_processes_share_the_moved_images_of_one(tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(World, "total", lambda self, number: number)

    def seen(ranks: World) -> list[torch.Tensor]:
        run = _Run(dataclasses.replace(tiny, eval_every=3), None, ranks)
        parts: list[torch.Tensor] = []
        run.step = lambda x, y: (parts.append(x), torch.zeros(()))[1]
        run.run_epoch()
        return parts

    first, second = seen(World(0, 2)), seen(World(1, 2))
    together = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    assert torch.equal(torch.cat(together), torch.cat(seen(World())))


# --- optimiser, schedule, loss -------------------------------------------------------------------------------


def test_sgd_is_nesterovs_with_weight_decay(tiny: TrainConfig):
    """Three steps against the formula: v ← 0.9 v + g, w ← w − lr (g + 0.9 v), with g + decay · w for g."""
    model = torch.nn.Linear(3, 2, bias=False).double()
    optimiser = build_optimiser(dataclasses.replace(tiny, lr=0.2, weight_decay=0.3), model)
    w, v = model.weight.detach().clone(), torch.zeros(2, 3).double()
    for step in range(3):
        g = torch.full((2, 3), 0.5 + step).double()
        model.weight.grad = g.clone()
        optimiser.step()
        g = g + 0.3 * w
        v = 0.9 * v + g
        w = w - 0.2 * (g + 0.9 * v)
    torch.testing.assert_close(model.weight.detach(), w)


def test_the_rate_rises_and_then_follows_its_schedule():
    cosine = TrainConfig(schedule="cosine", warmup=0.25, lr=2.0)
    rates = [learning_rate(cosine, progress) for progress in (0, 0.125, 0.25, 0.625, 1)]
    assert rates == pytest.approx([0, 1, 2, 1, 0])
    assert learning_rate(TrainConfig(warmup=0.5, lr=2.0), 0.75) == 2.0
    assert learning_rate(TrainConfig(schedule="linear", lr=2.0), 0.75) == 0.5
    plain = TrainConfig(schedule="cosine")  # as it was before there was a warm-up, to the last bit
    assert learning_rate(plain, 0.3) == plain.lr * (1 + math.cos(math.pi * 0.3)) / 2


def test_smoothing_spreads_a_part_of_the_target():
    outputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    weights = 0.8 * F.one_hot(targets, 4) + 0.2 / 4
    expected = -(weights * outputs.log_softmax(1)).sum(1)
    torch.testing.assert_close(smoothed_loss(0.2)(outputs, targets), expected)
    assert smoothed_loss(0.0) is per_sample_loss


# --- whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{}, {"optimiser": "adamw", "lr": 0.01}, {"method": "feedback-direct", "sites": "4"}]
)
def test_a_resumed_run_is_bit_equal(tiny: TrainConfig, tmp_path: Path, change: dict):
    class Stop(Exception):
        pass

    def stop(row: dict) -> None:
        if row["epoch"] == 2:
            raise Stop

    config = dataclasses.replace(tiny, **change)
    train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "parts", on_epoch=stop)
    train(config, tmp_path / "parts")
    whole, parts = checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "parts")
    assert whole is not None
    assert parts is not None
    assert whole[0].keys() == parts[0].keys()
    for name, value in whole[0].items():
        assert torch.equal(value, parts[0][name]), name


@pytest.mark.parametrize("rule", [("backprop", "sgd"), ("wperp", "adamw"), ("feedback-chained", "sgd")])
def test_channels_last_changes_the_layout_alone(tiny: TrainConfig, rule: tuple[str, str]):
    """The fused optimisers read weights, gradients and their own state as they lie in memory: all must lie alike."""
    change = {"model": "cnn", "depth": 2, "width": 4, "k": 2, "autocast": False, "dtype": "float64", "epochs": 2}
    config = dataclasses.replace(tiny, method=rule[0], optimiser=rule[1], lr=0.01, **change)
    losses = []
    for last in (False, True):
        run = _Run(dataclasses.replace(config, channels_last=last), None)
        assert run.model[2].weight.is_contiguous(memory_format=torch.channels_last) == last
        losses.append(run.go(None, print)["metrics"]["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_resnet18_has_its_known_size():
    recipe = TASKS["resnet18-cifar10"].config
    shape, source = data.Shape("image", (3, 32, 32), 10), torch.Generator().manual_seed(0)
    model = build(recipe.model, shape, recipe.width, recipe.depth, recipe.bias, recipe.activation, source)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
