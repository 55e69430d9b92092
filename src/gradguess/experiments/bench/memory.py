"""Peak memory of one training loop, in a process of its own: growth of the resident set, or CUDA's allocator.

`python -m gradguess.experiments.bench.memory '{"method": "replay", "case": {"depth": 100}, "steps": 1}'` measures one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from gradguess.errors import GradguessError
from gradguess.experiments.bench.loops import Case, fewer, make_loop
from gradguess.experiments.environment import PeakMemory

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
    command = [sys.executable, "-m", "gradguess.experiments.bench.memory", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GradguessError(f"measuring the memory of {job['method']} failed: {last[0]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


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


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    print(json.dumps(probe(job["method"], Case(**job["case"]), job["steps"])))


if __name__ == "__main__":
    main()
