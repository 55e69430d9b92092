"""Jobs next to each other: their order, what waits for what, and (with a GPU) the same numbers."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from gradguess.backends import streams
from gradguess.backends.streams import side_by_side

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_on_a_cpu_jobs_are_called_in_order():
    log = []
    results = side_by_side(CPU, [lambda i=i: log.append(i) or i * i for i in range(4)])
    assert log == [0, 1, 2, 3]
    assert results == [0, 1, 4, 9]
    assert side_by_side(CPU, []) == []


class FakeStream:
    """A stream that writes down what happens on it."""

    log: list[tuple[str, ...]]
    current: FakeStream

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        FakeStream.log.append((self.name, "waits for", other.name))


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA's streams without CUDA; returns the log."""
    names = iter("abcdefgh")
    FakeStream.log, FakeStream.current = [], FakeStream("main")

    @contextmanager
    def on(stream):
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    streams._sides.cache_clear()
    yield FakeStream.log
    streams._sides.cache_clear()


def job(name: str):
    return lambda: FakeStream.log.append((FakeStream.current.name, "runs", name)) or name


def test_the_last_job_runs_on_the_current_stream_between_two_waits(fake_cuda):
    assert side_by_side(CUDA, [job("x"), job("y"), job("z")]) == ["x", "y", "z"]
    assert fake_cuda == [
        ("a", "waits for", "main"),
        ("b", "waits for", "main"),
        ("a", "runs", "x"),
        ("b", "runs", "y"),
        ("main", "runs", "z"),
        ("main", "waits for", "a"),
        ("main", "waits for", "b"),
    ]


def test_there_are_five_side_streams_at_most_and_they_are_used_again(fake_cuda):
    for _ in range(2):
        side_by_side(CUDA, [job(str(i)) for i in range(8)])
    ran = [stream for stream, what, _ in fake_cuda if what == "runs"]
    assert ran == [*"abcdeab", "main"] * 2


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_waits_where_nothing_is_beside(fake_cuda, count):
    side_by_side(CUDA, [job("x")] * count)
    assert fake_cuda == [("main", "runs", "x")] * count


def test_the_current_stream_waits_even_after_a_failure(fake_cuda):
    def fail() -> None:
        raise ValueError("a job failed")

    with pytest.raises(ValueError, match="a job failed"):
        side_by_side(CUDA, [job("x"), fail])
    assert fake_cuda[-1] == ("main", "waits for", "a")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_results_are_those_of_one_after_the_other():
    x = torch.randn(8, 200, 200, device="cuda")
    found = side_by_side(x.device, [lambda a=a: a @ a @ a for a in x])
    for a, b in zip(x, found, strict=True):
        assert torch.equal(a @ a @ a, b)
