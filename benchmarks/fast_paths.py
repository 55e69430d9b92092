"""What each hand-written fast path of a GPU gains: a step without it over a step with it.

Every path is switched off alone. Loops take turns in one process, with and without CUDA graphs. Also timed are the
per-sample solvers, which have no fast path there.

    PYTHONPATH=src python3 benchmarks/fast_paths.py --out results/bench/fast-paths-cuda.json
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gradguess.backends import kernels
from gradguess_lab import environment
from gradguess_lab.bench.cases import Case
from gradguess_lab.bench.loops import Loop, Replayed
from gradguess_lab.bench.record import keep
from gradguess_lab.bench.registry import make_loop
from gradguess_lab.bench.timing import measure, measure_once

METHODS = ("wperp", "feedback-direct-rare")
SOLVERS = ("wperp-subspace", "wperp-ns")


def _never(*_: Any) -> bool:
    return False


PATHS: dict[str, list[tuple[Any, str, Any]]] = {
    "nothing": [],
    "nothing, again": [],
    "kernels for small factors": [(kernels, "usable", _never)],
}


class _Without(Replayed):
    """A loop whose steps run without a path. As a `Replayed`, it is started until all of its steps are recorded."""

    def __init__(self, loop: Loop | Replayed, path: str) -> None:
        super().__init__(loop)  # type: ignore[arg-type]
        self.path = path

    def turn(self) -> Any:  # type: ignore[override]
        with ExitStack() as stack:
            for change in PATHS[self.path]:
                stack.enter_context(patch.object(*change))
            return self.loop.turn()


def _rows(width: int, method: str, captured: bool, seconds: float) -> list[dict[str, Any]]:
    case = Case(width=width, device="cuda")
    wrap = Replayed if captured else (lambda loop: loop)
    loops: dict[str, Any] = {path: _Without(wrap(make_loop(method, case)), path) for path in PATHS}
    loops["backprop"] = wrap(make_loop("backprop", case))
    times = measure(loops, seconds, "cuda")
    base, anchor = times["nothing"], times["backprop"]
    return [
        {
            "width": width,
            "method": method,
            "captured": captured,
            "without": path,
            "over_with": times[path].ratio(base),
            "over_backprop": times[path].ratio(anchor),
            "step_ms": 1e3 * times[path].step,
            "refresh_ms": 1e3 * times[path].refresh,
        }
        for path in loops
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    given = parser.parse_args()
    record: dict[str, Any] = {
        "schema": 1,
        "kind": "fast-paths-cuda",
        "environment": environment.describe("cuda"),
        "rows": [],
        "per_sample": [],
    }
    for width in given.widths:
        for method in METHODS:
            for captured in (True, False):
                record["rows"] += _rows(width, method, captured, given.seconds)
                keep(record, given.out.parent, given.out.name)
                for row in record["rows"][-len(PATHS) - 1 :]:
                    print(json.dumps(row), flush=True)
    for method in SOLVERS:
        ms = 1e3 * measure_once(make_loop(method, Case(width=512, device="cuda")), "cuda")
        record["per_sample"].append({"method": method, "width": 512, "step_ms": ms})
        print(json.dumps(record["per_sample"][-1]), flush=True)
        keep(record, given.out.parent, given.out.name)


if __name__ == "__main__":
    main()
