"""Whether stored results are those of the present code (`gradguess reproduce --check`).

A row holds the losses of the first three steps of its run, `first`. They hang on data, network, loop and estimates. A
check makes these steps again and compares. A row of other code counts as seen if its run was started again on the
commit that made it and met the losses that the row holds: `seen` names that commit and how far off they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradguess.errors import GradguessError
from gradguess_lab.config import TrainConfig

CLOSE, CLOSE_IN_HALF = 2e-6, 1e-2  # relative: three steps in float32, and in bfloat16 or by TF32
MEANING = {
    "current": "the present code makes the same first steps",
    "seen": "other code made them, and their commit, started again, makes them",
    "stale": "other code made them, and nobody has started it again",
    "elsewhere": "they need CUDA, which this machine lacks",
    "unknown": "they hold no first steps",
}
Verdicts = dict[str, dict[str, str]]  # one of MEANING -> key of a row -> what was met


def sample(rows: Sequence[Mapping[str, Any]], size: int | None) -> list[Mapping[str, Any]]:
    """So many rows, the same ones at every call; all of them for None."""
    return list(rows) if size is None or size >= len(rows) else random.Random(0).sample(rows, size)


def check(rows: Iterable[Mapping[str, Any]], jobs: int = 1) -> Verdicts:
    """Make the first steps of each row again, in so many processes."""
    import joblib

    verdicts: Verdicts = {name: {} for name in MEANING}
    for key, name, why in joblib.Parallel(n_jobs=max(1, jobs))(joblib.delayed(verdict)(row) for row in rows):
        verdicts[name][key] = why
    return verdicts


def verdict(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The key, one of MEANING, and what was met."""
    from gradguess_lab.train import first_losses

    if not row.get("first"):
        return row["key"], "unknown", ""
    torch.set_num_threads(1)
    name, why = "current", ""
    try:
        config = TrainConfig.from_dict(row["config"])
        half = config.autocast or config.matmul != "highest" or config.dtype in ("float16", "bfloat16")
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            name = "elsewhere"
        else:
            pairs = zip(row["first"], first_losses(config), strict=True)
            off = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)  # relative to what is stored
            if off > (CLOSE_IN_HALF if half else CLOSE):
                name, why = "stale", f"first losses differ by {off:.1e}"
    except GradguessError as error:
        name, why = "stale", str(error)
    if "seen" in row and name in ("stale", "elsewhere"):
        name, why = "seen", row["seen"]["commit"][:10]
    return row["key"], name, why


def lines(verdicts: Verdicts) -> list[str]:
    """What a person reads."""
    said = []
    for name, rows in verdicts.items():
        said += [f"{len(rows)} results are {name}: {MEANING[name]}."] if rows else []
        if name in ("stale", "unknown"):
            said += [f"  {key}" + (f" ({why})" if why else "") for key, why in rows.items()]
    return said
