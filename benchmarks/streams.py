"""All runs of the page on streams, in parallel processes. Finished runs are kept and never made again.

    python benchmarks/streams.py --only recall12 --jobs 16 --minutes 9 --out results/streams
    python benchmarks/streams.py --only price --jobs 1
    python benchmarks/streams.py --device cpu --list

A group is tuned first and then run on the seeds that are reported: the same command goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradguess_lab.store import find
from gradguess_lab.streams.page import page
from gradguess_lab.streams.plan import GROUPS, chosen
from gradguess_lab.streams.sweep import sweep, wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help=f"this group; may be repeated: {', '.join(GROUPS)}")
    parser.add_argument("--out", type=Path, default=Path("results/streams"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes; 0: never")
    parser.add_argument("--device", default="", help="run everything there, whatever the plan says")
    parser.add_argument("--seeds", type=int, default=0, help="fewer or more seeds than the plan says")
    parser.add_argument("--page", action="store_true", help="print the tables of what is there, and run nothing")
    parser.add_argument("--list", action="store_true", help="show what is missing, and run nothing")
    options = parser.parse_args()
    groups = chosen(options.only or tuple(GROUPS), options.device, options.seeds)
    if options.page:
        print(page(options.out, groups))
        return
    if options.list:
        for name, group in groups.items():
            left = [config.key for config in wanted(options.out, group) if find(options.out, config.key) is None]
            print(f"{name}: {len(left)} runs can start now", *left, sep="\n  ")
        return
    failures = sweep(groups.values(), options.out, options.jobs, options.minutes, lambda text: print(text, flush=True))
    if failures:
        raise SystemExit("\n".join(f"{key}: {message}" for key, message in failures.items()))


if __name__ == "__main__":
    main()
