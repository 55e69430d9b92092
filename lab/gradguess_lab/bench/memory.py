"""Peak memory of one training loop, in a process of its own: growth of the resident set, or CUDA's allocator.

`python -m gradguess_lab.bench.memory '{"method": "replay", "case": {"depth": 100}, "steps": 1}'` measures one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from gradguess.errors import GradguessError
from gradguess_lab.bench.cases import Case, fewer
from gradguess_lab.bench.loops import Loop, Replayed
from gradguess_lab.bench.registry import make_loop
from gradguess_lab.bench.timing import first_rounds
from gradguess_lab.environment import PeakMemory

STEPS = 4  # a multiple of every method's own period
# glibc keeps freed blocks for itself, more of them the more often a loop allocates. With these settings they go back at
# once, so that the resident set is what the loop holds. That is slow, so times are taken in another process.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(method: str, case: Case, threads: int, timed: bool = True) -> dict[str, float]:
    """`peak_mb` above the loop's own state (weights and the optimiser's), `gradients_mb` of it, and `step_ms`.

    Unless `timed`, the time is that of the slow steps whose memory was measured.
    """
    job = {"method": method, "case": dataclasses.asdict(case), "threads": threads}
    found = _in_a_process(job | {"steps": 1}, EXACT)
    return found | {"step_ms": _in_a_process(job | {"steps": STEPS}, {})["step_ms"]} if timed else found


def _in_a_process(job: dict[str, Any], variables: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = run_apart(job["method"], [__spec__.name, json.dumps(job)], variables)
    return found


def run_apart(what: str, command: Sequence[str], variables: dict[str, str]) -> Any:
    """What a module prints as JSON in a process of its own; `what` is measured there."""
    whole = [sys.executable, "-m", *command]
    done = subprocess.run(whole, capture_output=True, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GradguessError(f"measuring {what} failed: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(method: str, case: Case, steps: int = STEPS) -> dict[str, float]:
    """Measure in this process, which should be a fresh one."""
    loop = make_loop(method, fewer(case, 2))
    loop.step()  # now libraries are set up, and the optimiser has its state
    loop.optimiser.zero_grad()
    loop.x, loop.y = case.data()
    meter = PeakMemory(case.device)
    seconds = []
    for _ in range(max(steps, loop.every)):
        start = time.perf_counter()
        loop.step()
        if torch.device(case.device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    gradients = sum(p.numel() * p.element_size() for group in loop.optimiser.param_groups for p in group["params"])
    return {
        "peak_mb": meter.megabytes(),
        "gradients_mb": gradients / 2**20,  # part of the peak, and the same for every method
        "step_ms": 1e3 * statistics.mean(seconds),
    }


def peak_here(loop: Loop | Replayed, device: str) -> float:
    """MB that steps of every kind take above what lies in memory between two steps. On a CPU this needs `EXACT`.

    Steps are made before, so that libraries are set up and everything is compiled. A captured step is captured once
    more: its CUDA graphs keep their memory to themselves, and that counts.
    """
    own = loop.loop if isinstance(loop, Replayed) else loop
    first_rounds(loop, device)
    own.optimiser.zero_grad()
    meter = PeakMemory(device)
    if not meter.cuda:
        first_rounds(loop, device)
        return meter.megabytes()
    taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    again = Replayed(own) if isinstance(loop, Replayed) else own
    first_rounds(again, device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device) - reserved
    return max(meter.megabytes() - taken / 2**20, held / 2**20)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    print(json.dumps(probe(job["method"], Case(**job["case"]), job["steps"])))


if __name__ == "__main__":
    main()
