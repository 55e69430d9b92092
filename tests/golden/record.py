"""Write tests/golden/golden.npz anew: python tests/golden/record.py [CASE ...]

With names, these cases alone are computed anew, and the others stay as they are. This is done only when a change of
the numbers is wanted, and the message of the commit must say why they change.

Every case is computed as it is, and with weights that differ by 1e-15 of their size in four ways. What this does to its
numbers is what another order of summation may do. A case is held to 1e-10; where that is less than 30 times what was
seen, to so much, but a case that would need more than 1e-7 is left out, and named in the file.

The file holds `values`, the numbers of all cases one after another, and `about`, JSON in bytes: `labels` (case -> its
labels, in the order of `values`), `tolerances` (of cases that are not held to 1e-10), `turning` and `refused` (cases
that were left out).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gradguess as gg
from golden import cases
from golden.compare import FILE, TOLERANCE, golden, worst

WOBBLES, MARGIN, LOOSEST = 4, 30, 1e-7


def record(only: Sequence[str]) -> None:
    values: list[float] = []
    labels: dict[str, list[str]] = {}
    tolerances: dict[str, float] = {}
    turning: list[str] = []
    refused: list[str] = []
    known = golden() if only else {}
    if only:
        with np.load(FILE, allow_pickle=False) as file:
            before = json.loads(file["about"].tobytes())
        turning, refused = ([name for name in before[key] if name not in only] for key in ("turning", "refused"))
    names = [name for name in cases.CASES if not only or name in only or name in known]
    with ProcessPoolExecutor(2) as pool:
        todo = [name for name in names if not only or name in only]
        examined = dict(zip(todo, pool.map(_examine, todo), strict=True))
        for name in names:
            found, moved = examined[name] if name in examined else (known[name][0], known[name][1] / MARGIN)
            if found is None:
                refused.append(name)
            elif MARGIN * moved > LOOSEST:
                turning.append(name)
            else:
                labels[name] = list(found)
                values += found.values()
                if MARGIN * moved > TOLERANCE:
                    tolerances[name] = float(f"{MARGIN * moved:.1e}")
    about = {"labels": labels, "tolerances": tolerances, "turning": turning, "refused": refused}
    text = json.dumps(about, separators=(",", ":")).encode()
    np.savez_compressed(FILE, values=np.array(values), about=np.frombuffer(text, np.uint8))
    print(f"{len(labels)} cases, {len(values)} numbers, {FILE.stat().st_size} bytes")
    print(f"refused: {len(refused)}", *refused, sep="\n  ")
    print(f"turn with the last bit of the weights: {len(turning)}", *turning, sep="\n  ")
    print(f"held to less than {TOLERANCE}: {len(tolerances)}", *tolerances.items(), sep="\n  ")


def _examine(name: str) -> tuple[cases.Numbers | None, float]:
    """The numbers of a case (None: it is refused), and how far the last bit of the weights moves them."""
    try:
        found, moved = cases.compute(name), 0.0
        for cases.WOBBLE in range(1, 1 + WOBBLES):
            moved = max(moved, worst(found, cases.compute(name))[0])
            if MARGIN * moved > LOOSEST:
                break
        return found, moved
    except gg.InputError:
        return None, 0.0
    finally:
        cases.WOBBLE = 0


if __name__ == "__main__":
    record(sys.argv[1:])
