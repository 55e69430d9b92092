"""Run by test_processes.py: every scenario's gradients over some steps, and what was sent, for each rank.

    python processes_worker.py DIRECTORY

One process imports PyTorch and becomes four by forks. They are a world of four, then two of them are a world of two.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

import gradguess as gg
from models import GUESSES, RIVALS, STUDENTS, make

STEPS = 3
FORMS = {f: gg.Feedback(gg.WPerp(k=3, refresh=2), form=f) for f in ("direct", "chained", "corrected")}
OPTIONS = {
    "boot": gg.Feedback(gg.WPerp(k=3), bootstrap=0.5),
    "part": gg.Feedback(gg.WPerp(k=3), fraction=0.99),  # rounds to all
}
METHODS = {**GUESSES, **FORMS, **OPTIONS, **RIVALS, **STUDENTS, "backprop": gg.Backprop()}
SCENARIOS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # not: W⊥-NS fits to the first samples of rank 0; the basis of a null space turns with the rounding of the weights
    **{f"{m}/mlp": (m, "relu-bias", {}) for m in METHODS if not m.startswith("ns") and m != "svd-bottom"},
    **{f"{m}/{n}": (m, n, {}) for n in ("cnn", "residual", "transformer") for m in ("wt", "shared", "direct")},
    "chained/residual": ("chained", "residual", {}),
    "shared/replay": ("shared", "relu-bias", {"memory": "replay"}),
    "direct/replay": ("direct", "relu-bias", {"memory": "replay"}),
    "shared/chunk": ("shared", "relu-bias", {"chunk": 2}),
    "shared/balance": ("shared", "gelu-bias", {"balance": True}),
    "weight/tangents": ("weight", "relu-bias", {"tangents": 2}),
    "shared/batch": ("shared", "relu-bias", {"coupling": "batch"}),
    "shared/isolate": ("shared", "relu-bias", {"isolate": True}),
    "students/pieces": ("students", "residual", {"sites": 3}),
    "students/chunk": ("students", "relu-bias", {"chunk": 2}),
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each tensor that this process puts into a collective."""
    sent: list[int] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            sent.extend(t.nbytes for t in args if isinstance(t, torch.Tensor))
            return real(*args, **options)

        return call

    names = ("all_reduce", "broadcast", "all_gather")
    with mock.patch.multiple(distributed, **{name: watched(getattr(distributed, name)) for name in names}):
        yield sent


def run(name: str, rows: slice) -> dict[str, Any]:
    method, model, options = SCENARIOS[name]
    case = make(model, seed=0)
    if rows.start:  # a rank that starts elsewhere is put right
        with torch.no_grad():
            next(case.model.parameters()).add_(1)
    forward = gg.ForwardGradient(case.model, METHODS[method], **options)
    optimiser = torch.optim.SGD(case.model.parameters(), lr=0.1)
    grads = []
    for step in range(STEPS):
        optimiser.zero_grad()
        total = len(case.targets)
        with counted() as sent:
            forward(case.loss_fn, case.inputs[rows], case.targets[rows], place=(rows.start, total) if step else None)
        grads += [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
        optimiser.step()
    return {"grads": grads, "state": forward.state_dict(), "sent": sum(sent)}


def faults(rank: int) -> dict[str, Any]:
    """NaN in one rank's samples: all ranks say so, or skip."""
    found: dict[str, Any] = {}
    for method in ("weight", "shared", "direct"):
        case = make("relu-bias")
        x = case.inputs[: 2 + rank].clone()
        x[0, 0] = float("nan") if rank == 1 else 0.0
        forward = gg.ForwardGradient(case.model, METHODS[method])
        try:
            forward(case.loss_fn, x, case.targets[: 2 + rank])
            found[method] = "no error"
        except gg.NonFiniteError as error:
            found[method] = str(error)
        skipping = gg.ForwardGradient(case.model, METHODS[method], nonfinite="skip")
        skipping(case.loss_fn, x, case.targets[: 2 + rank])
        found[f"{method}/skipped"] = skipping.skipped
        found[f"{method}/grad"] = case.model[0].weight.grad
    return found


BOUNDS = {4: [0, 1, 2, 3, 5], 2: [0, 3, 5]}  # which of five samples a rank has: unevenly shared


def be(rank: int, directory: Path) -> None:
    """One rank of every world that it is in."""
    for size, bounds in BOUNDS.items():
        if rank < size:
            meet = f"file://{directory}/meet{size}"
            distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
            runs = {name: run(name, slice(bounds[rank], bounds[rank + 1])) for name in SCENARIOS}
            torch.save({"runs": runs, "faults": faults(rank) if size == 2 else {}}, directory / f"{size}-{rank}.pt")
            distributed.destroy_process_group()


def main(directory: Path) -> int:
    torch.set_num_threads(1)
    ranks = [multiprocessing.get_context("fork").Process(target=be, args=(rank, directory)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    while alive := [rank.sentinel for rank in ranks if rank.is_alive()]:  # to wait for none would never end
        connection.wait(alive)
        if any(rank.exitcode for rank in ranks):  # the others would wait for it
            for rank in ranks:
                rank.terminate()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    import torch._dynamo  # the optimiser asks for it: once here, not in every rank

    sys.exit(main(Path(sys.argv[1])))
