"""What training runs on images add: moved images, SGD, warm-up, label smoothing, bfloat16, channels last."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradguess as gg
from gradguess.errors import InputError
from gradguess_lab import checkpoint, data
from gradguess_lab import train as train_module
from gradguess_lab.augment import REACH, draw_moves, moved
from gradguess_lab.config import BEFORE, TrainConfig, differences
from gradguess_lab.datasets.source import Arrays, Source, named
from gradguess_lab.loss import per_sample_loss, smoothed_loss
from gradguess_lab.models import MODELS
from gradguess_lab.optimiser import as_weights, build_optimiser, learning_rate
from gradguess_lab.recipes import RECIPES
from gradguess_lab.tables.runs import command
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


def test_every_move_is_equally_likely():
    """27,000 draws: each of 81 places and 2 sides is expected 166.7 times, with a deviation of 12.9; five may be."""
    moves = draw_moves(27_000, torch.Generator().manual_seed(1))
    assert moves[:, :2].abs().max() == REACH
    place = ((moves[:, 0] + REACH) * 9 + moves[:, 1] + REACH) * 2 + moves[:, 2]
    counts = torch.bincount(place, minlength=162).double()
    assert len(counts) == 162
    assert (counts - 27_000 / 162).abs().max() < 5 * math.sqrt(27_000 / 162)


def test_each_image_moves_once_in_an_epoch_however_batches_are_cut(tiny: TrainConfig):
    def seen(batch: int) -> torch.Tensor:
        run = _Run(dataclasses.replace(tiny, batch=batch), None)
        parts: list[torch.Tensor] = []
        run.step = lambda x, y: (parts.append(x), torch.zeros(()))[1]
        run.run_epoch()
        run.run_epoch()
        return torch.cat(parts)

    images = seen(20)
    assert torch.equal(images, seen(7))
    first, second = (part[part.flatten(1).double().sum(1).argsort()] for part in images.split(48))
    assert not torch.equal(first, second)


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


def test_runs_without_moved_images_draw_nothing_for_them(tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_module, "draw_moves", lambda *_: pytest.fail("drew"))
    run = _Run(dataclasses.replace(tiny, augment=False), None)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(tiny.seed))
    parts: list[torch.Tensor] = []
    run.step = lambda x, y: (parts.append(x), torch.zeros(()))[1]
    run.run_epoch()
    assert torch.equal(torch.cat(parts), run.data.x_train[order])


def test_what_cannot_be_moved_is_refused():
    pytest.importorskip("mnist1d")
    with pytest.raises(InputError, match="augment moves images of more than 4 pixels"):
        train(TrainConfig(augment=True, epochs=1))


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


def test_a_constant_rate_rises_too(tiny: TrainConfig):
    run = _Run(dataclasses.replace(tiny, schedule="constant", warmup=0.5, epochs=2), None)
    rates: list[float] = []
    run.step = lambda x, y: (rates.append(run.optimiser.param_groups[0]["lr"]), torch.zeros(()))[1]
    run.run_epoch()
    run.epoch = 1
    run.run_epoch()
    assert rates == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1])


def test_smoothing_spreads_a_part_of_the_target():
    outputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    weights = 0.8 * F.one_hot(targets, 4) + 0.2 / 4
    expected = -(weights * outputs.log_softmax(1)).sum(1)
    torch.testing.assert_close(smoothed_loss(0.2)(outputs, targets), expected)
    assert smoothed_loss(0.0) is per_sample_loss


@pytest.mark.parametrize(("name", "value"), [("warmup", 1.0), ("smoothing", -0.1), ("optimiser", "sdg")])
def test_bad_values_are_refused(name: str, value: object):
    with pytest.raises(InputError, match=name):
        TrainConfig(**{name: value})


def test_older_results_keep_their_keys_and_are_recognised():
    added = ("augment", "optimiser", "warmup", "smoothing", "autocast", "channels_last")
    stored = {name: value for name, value in TrainConfig().as_dict().items() if name not in added}
    assert {name: BEFORE[name] for name in added} == {name: getattr(TrainConfig(), name) for name in added}
    assert differences(TrainConfig(threshold="placed"), stored) == []
    assert TrainConfig(schedule="cosine", lr=3e-3).key == "wperp-w128-s0-lr0.003-schedulecosine"


def test_a_long_key_is_cut_and_stays_unique():
    recipe = dataclasses.replace(RECIPES["resnet18-cifar10"], method="feedback-chained", sites="8", device="cuda")
    keys = {dataclasses.replace(recipe, lr=lr, eval_every=7, diagnose="0,1,10", every=4).key for lr in (0.1, 0.2)}
    assert [len(key) for key in keys] == [200, 200]
    ends = {dataclasses.replace(recipe, eval_every=7, diagnose=days, every=4, fraction=0.25).key for days in ("1", "2")}
    assert len({key[:-8] for key in ends}) == 1  # what differs is cut off
    assert len(ends) == 2


def test_a_run_does_not_warn_of_its_batch_norm(tiny: TrainConfig):
    run = _Run(dataclasses.replace(tiny, method="wperp", autocast=False), None)
    run.step(run.data.x_train[:5], run.data.y_train[:5])  # a warning would be an error


def test_a_run_learns_from_smoothed_targets(tiny: TrainConfig):
    outputs, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
    run = _Run(tiny, None)
    assert torch.equal(run.loss(outputs, targets), expected)
    run.forward = lambda loss_fn, x, y, place: loss_fn(outputs, targets)  # which loss a step differentiates
    assert torch.equal(run.step(outputs, targets), expected)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_commands(name: str):
    text = (Path(__file__).parents[2] / "docs" / "cifar10.md").read_text(encoding="utf-8")
    assert command(RECIPES[name].as_dict()) in re.sub(r"\s*\\\n\s*", " ", text)


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


def test_the_recipe_learns(tiny: TrainConfig):
    record = train(dataclasses.replace(tiny, epochs=20, width=4))
    assert record["metrics"]["test_accuracy"] > 0.8


@pytest.mark.parametrize("method", ["backprop", "wt", "wperp", "feedback-chained", "students", "dfa", "mezo"])
def test_methods_train_in_bfloat16(tiny: TrainConfig, method: str):
    """Weights keep their type, and steps and evaluations compute in bfloat16."""
    config = dataclasses.replace(tiny, model="cnn", depth=2, width=4, method=method, epochs=1, k=2, solver="shared")
    run, seen = _Run(config, None), set()
    run.model[0].register_forward_hook(lambda module, args, output: seen.add((module.training, output.dtype)))
    row = run.run_epoch()
    assert math.isfinite(row["loss"])
    assert math.isfinite(row["test_loss"])
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert {training for training, _ in seen} == {True, False}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_bfloat16_is_near_full_precision(tiny: TrainConfig):
    """At a rate so small that rounding alone differs: bfloat16 keeps eight bits, and there are 18 layers."""
    still = dataclasses.replace(tiny, lr=1e-6)
    losses = [_Run(dataclasses.replace(still, autocast=on), None).run_epoch()["loss"] for on in (False, True)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("method", ["backprop", "wperp", "feedback-chained"])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_channels_last_changes_the_layout_alone(tiny: TrainConfig, method: str, optimiser: str):
    """The fused optimisers read weights, gradients and their own state as they lie in memory: all must lie alike."""
    change = {"model": "cnn", "depth": 2, "width": 4, "k": 2, "autocast": False, "dtype": "float64", "epochs": 2}
    config = dataclasses.replace(tiny, method=method, optimiser=optimiser, lr=0.01, **change)
    losses = []
    for last in (False, True):
        run = _Run(dataclasses.replace(config, channels_last=last), None)
        assert run.model[2].weight.is_contiguous(memory_format=torch.channels_last) == last
        losses.append(run.go(None, print)["metrics"]["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_state_is_laid_out_as_the_weights():
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimiser = torch.optim.SGD([weight], 0.1, 0.9)
    buffer = torch.randn(4, 3, 2, 2)
    optimiser.state[weight]["momentum_buffer"] = buffer
    as_weights(optimiser)
    found = optimiser.state[weight]["momentum_buffer"]
    assert found.stride() == weight.stride()
    assert torch.equal(found, buffer)


# --- networks ------------------------------------------------------------------------------------------------

CIFAR = data.Shape("image", (3, 32, 32), 10)


def build(name: str) -> torch.nn.Module:
    recipe = RECIPES[name]
    generator = torch.Generator().manual_seed(0)
    return MODELS[recipe.model](CIFAR, recipe.width, recipe.depth, recipe.bias, recipe.activation, generator)


def test_resnet18_has_its_known_size():
    model = build("resnet18-cifar10")
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    x = torch.randn(2, 3, 32, 32)
    sizes = []
    for layer in model:
        x = layer(x)
        sizes.append(tuple(x.shape[1:]))
    assert sizes[3:] == [
        *[(64, 32, 32)] * 3,
        *[(128, 16, 16)] * 2,
        *[(256, 8, 8)] * 2,
        *[(512, 4, 4)] * 2,
        (10,),
    ]


@pytest.mark.parametrize(
    ("name", "pieces", "expected"),
    [
        ("resnet18-cifar10", 4, [5, 7, 9]),  # the last blocks of the stages
        ("resnet18-cifar10", 8, [4, 5, 6, 7, 8, 9, 10]),
        ("vit-cifar10", 4, [1, 3, 5]),
        ("vit-cifar10", 8, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_pieces_end_with_blocks(name: str, pieces: int, expected: list[int]):
    model, path = build(name), "{}" if "resnet" in name else "blocks.{}"
    forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=1), form="direct"), sites=pieces)
    forward(per_sample_loss, torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert [site.name for site in forward.layout.sites][:-1] == [path.format(i) for i in expected]


def test_the_vit_costs_what_the_resnet_costs():
    """Multiplications of one image: 555 million against 510, and 19 more between queries, keys and values."""
    from torch.utils.flop_counter import FlopCounterMode

    found = {}
    for name in RECIPES:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            build(name).eval()(torch.randn(1, 3, 32, 32))
        found[name] = counter.get_total_flops() / 2e6
    assert found["resnet18-cifar10"] == pytest.approx(555.4, abs=0.1)
    assert found["vit-cifar10"] == pytest.approx(520, abs=10)  # the counter does not know every kernel of attention
