"""The loops of the benchmark: replayed from CUDA graphs they make the same steps."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradguess_lab.bench.loops import make_loop
from gradguess_lab.bench.run import peak_here
from gradguess_lab.config import TrainConfig

CASE = TrainConfig(width=32, depth=3, batch=64, k=4, device="cuda")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [(name, compiled) for name in ("backprop", "mezo", "wperp") for compiled in (False, True)]
    + [(name, False) for name in ("checkpoint-all", "dfa", "fdfa", "local-linear", "local-predsim", "frozen")],
)
def test_replayed_loops_make_the_same_steps(name: str, compiled: bool):
    plain, captured = (make_loop(name, CASE, compiled) for _ in range(2))
    replayed = captured.replayed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
        for _ in range(8):
            replayed.turn()
        for _ in range(8 if plain.forward else 8 + 3):  # a graph of backpropagation is recorded after three steps
            plain.step()
    for a, b in zip(plain.model.parameters(), captured.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_graphs_count_as_memory():
    loop = make_loop("backprop", TrainConfig(width=256, depth=24, batch=2048, device="cuda"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        plain, captured = peak_here(loop), peak_here(loop.replayed())
    assert plain > 24 * 2  # MB: 24 layers of 2048 × 256 numbers
    assert captured > 0.9 * plain
