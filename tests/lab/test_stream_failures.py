"""Runs on streams that leave all bounds, and what a run leaves behind."""

from __future__ import annotations

import torch

from gradguess.errors import NonFiniteError
from gradguess.online import Online
from gradguess_lab.streams import plan
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.streams.page import page
from gradguess_lab.streams.run import run
from gradguess_lab.streams.sweep import sweep
from online_streams import Here

SMALL = StreamConfig(delay=2, k=3, width=6, streams=3, steps=12, refresh=5)


def test_a_run_that_diverges_at_once_is_a_result(tmp_path, monkeypatch):
    def diverge(self, *args):
        raise NonFiniteError("too large")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Here)
    one, two = (plan.Group([SMALL], grid=(), seeds=seeds) for seeds in (1, 2))
    with monkeypatch.context() as patched:
        patched.setattr(Online, "__call__", diverge)
        assert run(SMALL)["failed"] == "too large"
        assert sweep([one], tmp_path, 1, say=lambda text: None) == {}
    assert "none; 1 diverged" in page(tmp_path, {"recall12": one})
    sweep([two], tmp_path, 1, say=lambda text: None)
    assert "); 1 diverged" in page(tmp_path, {"recall12": two})


def test_a_run_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    run(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
