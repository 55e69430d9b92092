"""How far one step leads through the code: crossings from one file of gradguess to another, and files visited.

    python benchmarks/crossings.py          # with --calls also from where to where

A crossing is a call whose caller, the nearest one inside `src/gradguess`, is in another file; PyTorch may lie between.
A generator counts once, however often it goes on. The step is the fourth of a run: nothing is searched for.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import gradguess as gg

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from models import Case, make

ROOT = str(Path(gg.__file__).parent) + "/"
CASES = [
    ("W⊥, MLP", "relu-bias", gg.WPerp(k=3)),
    ("feedback, MLP", "relu-bias", gg.Feedback(gg.WPerp(k=3))),
    ("W⊥, transformer", "transformer", gg.WPerp(k=3)),
]
GENERATOR = 0x20  # flag of a function's code


def crossings(case: Case, method: Any) -> tuple[Counter[tuple[str, str]], set[str]]:
    """(from, to) -> the number of calls in one step; and the files that are visited."""
    forward, calls, files = gg.ForwardGradient(case.model, method), Counter[tuple[str, str]](), set[str]()
    going_on = set[FrameType]()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        to, before = frame.f_code.co_filename, frame.f_back
        if event != "call" or not to.startswith(ROOT) or frame in going_on:
            return
        if frame.f_code.co_flags & GENERATOR:
            going_on.add(frame)
        files.add(to)
        while before is not None and not before.f_code.co_filename.startswith(ROOT):
            before = before.f_back
        if before is not None and before.f_code.co_filename != to:
            calls[before.f_code.co_filename.removeprefix(ROOT), to.removeprefix(ROOT)] += 1

    for number in range(4):
        sys.setprofile(watch if number == 3 else None)
        forward(*case.args)
        sys.setprofile(None)
    return calls, files


if __name__ == "__main__":
    print(f"{'':16}crossings  files")
    for name, model, method in CASES:
        calls, files = crossings(make(model), method)
        print(f"{name:16}{calls.total():9d}{len(files):7d}")
        for (below, above), count in calls.most_common() if "--calls" in sys.argv else ():
            print(f"    {count:4d}  {below} -> {above}")
