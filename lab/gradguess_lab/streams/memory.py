"""Tasks that ask for the past: recall and copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradguess_lab.streams.task import Moment, Task

SYMBOLS, LENGTH = 8, 5  # of the copy task


def recall(streams: int, delay: int, generator: torch.Generator) -> Task:
    """Random signs come in; the one of `delay` steps ago is asked for, at every step."""

    def moments() -> Iterator[Moment]:
        past = torch.zeros(streams, delay + 1)
        while True:
            signs = torch.randint(2, (streams, 1), generator=generator) * 2.0 - 1
            past = torch.cat([past[:, 1:], signs], 1)
            yield Moment(signs, past[:, :1])

    return Task(moments(), 1, 1, "squared", 1.0)


def copy(streams: int, delay: int, generator: torch.Generator) -> Task:
    """Five symbols out of eight come in, then blanks, then cues: at each cue the next symbol is asked for.

    The settings are those of sonaradarcn/sketched-rtrl: the streams start anew with every episode.
    """

    def moments() -> Iterator[Moment]:
        every, one_hot = torch.ones(streams, dtype=torch.bool), torch.eye(SYMBOLS + 2)
        blank, cue = (one_hot[SYMBOLS + i].expand(streams, -1) for i in range(2))
        while True:
            symbols = torch.randint(SYMBOLS, (streams, LENGTH), generator=generator)
            for t in range(LENGTH):
                yield Moment(one_hot[symbols[:, t]], None, every if t == 0 else None)
            for _ in range(delay):
                yield Moment(blank, None)
            for t in range(LENGTH):
                yield Moment(cue, symbols[:, t])

    return Task(moments(), SYMBOLS + 2, SYMBOLS, "classes", 1 - 1 / SYMBOLS)
