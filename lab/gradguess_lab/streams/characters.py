"""The characters of Shakespeare one by one: the next one is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradguess_lab.data import load
from gradguess_lab.streams.task import Moment, Task


def characters(streams: int, delay: int, generator: torch.Generator) -> Task:
    """Each stream starts at another place of the text; after its end it goes on at the beginning."""
    data = load("shakespeare")
    text = data.x_train.flatten()
    start = torch.randint(len(text), (), generator=generator)

    def moments() -> Iterator[Moment]:
        one_hot = torch.eye(data.classes)
        at = start + torch.arange(streams) * (len(text) // streams)
        while True:
            yield Moment(one_hot[text[at % len(text)]], text[(at + 1) % len(text)])
            at = at + 1

    return Task(moments(), data.classes, data.classes, "bits", 4.75)
