"""Which stored results no longer belong to the present code (`gradguess reproduce --check`).

A result is stale if it was made by another commit *and* the golden record of the estimates (`tests/golden/golden.npz`:
what the library computes, in float64, for a list of cases) is another one there and here, in the cases of its method.
A change of code that changes no estimate makes nothing stale. Runs on an MLP whose sites are its layers are held to the
cases of such networks alone: there every Jacobian has a closed form, and what is computed elsewhere is not used.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradguess.errors import GradguessError
from gradguess_lab.tables.runs import Run

GOLDEN = "tests/golden/golden.npz"
TOLERANCE = 1e-10  # of a case that names none, relative to the largest of its numbers
Golden = dict[str, tuple[dict[str, float], float]]  # case -> its numbers by label, and their tolerance
Config = Mapping[str, Any]

# The names in the golden record of what a run's method computes, each a part of a case's path.
_FEEDBACK = {"chained": ("chained", "sweeps", "boot", "part"), "direct": ("direct", "part-direct")}
_PARTS: dict[str, tuple[str, ...]] = {
    "wperp-bottom": ("bottom", "svd-bottom"),
    **{f"feedback-{form}": parts for form, parts in _FEEDBACK.items()},
    "feedback-corrected": ("corrected",),
}
_CHAINS = ("chain", "rising", "relu-", "gelu-", "tanh-")  # how the networks of such cases are called
_CUT = ("pieces/", "sites/", "run/")  # cases with other sites than the layers, and runs on which hooks come and go
_APART = {"svd-bottom", "ns-placed", "part-direct"}  # no variations of what they begin with


@dataclass
class Verdicts:
    """Keys of results, by what can be said of them."""

    stale: dict[str, str] = field(default_factory=dict)  # key -> the first case that differs
    without_commit: list[str] = field(default_factory=list)
    not_comparable: dict[str, str] = field(default_factory=dict)  # key -> why
    unclean: list[str] = field(default_factory=list)  # made with changes that were in no commit
    current: list[str] = field(default_factory=list)

    def to_run_again(self, runs: Sequence[Run]) -> list[Config]:
        """The configurations of all results that the present code has not made, the shortest first."""
        keys = {*self.stale, *self.without_commit, *self.not_comparable, *self.unclean}
        again = sorted((run for run in runs if run.key in keys), key=lambda run: run.metrics.get("seconds", 0.0))
        return [run.config for run in again]

    def lines(self) -> list[str]:
        """What a person reads."""
        said = [f"{len(self.current)} results belong to the present code."]
        groups = {
            "are stale: another commit made them, and the golden record of their method has changed": self.stale,
            "cannot be compared": self.not_comparable,
            "have no commit: which code made them cannot be told": dict.fromkeys(self.without_commit, ""),
            "were made with changes that were in no commit": dict.fromkeys(self.unclean, ""),
        }
        for words, keys in groups.items():
            if keys:
                said.append(f"{len(keys)} results {words}:")
                said += [f"  {key}" + (f" ({why})" if why else "") for key, why in keys.items()]
        return said


def check(runs: Sequence[Run], package: Path) -> Verdicts:
    """Compare every result's commit with the present code; `package` lies in the repository."""
    if shutil.which("git") is None:
        raise GradguessError("--check needs the program git, and it is not installed.")
    root = _repository(package)
    head, now = _git(root, "rev-parse", "HEAD").decode().strip(), _present(root)
    found = Verdicts()
    before: dict[str, Golden | str] = {}
    for run in runs:
        key, commit = run.key, run.environment.get("commit")
        if not commit:
            found.without_commit.append(key)
            continue
        if run.environment.get("clean") is False:
            found.unclean.append(key)
        if commit not in before:
            before[commit] = now if commit == head else _golden_of(root, commit)
        then = before[commit]
        if isinstance(then, str):
            found.not_comparable[key] = then
        elif (case := changed(then, now, run.config)) is not None:
            found.stale[key] = f"{commit[:10]}: {case}"
        else:
            found.current.append(key)
    return found


def changed(then: Golden, now: Golden, config: Config) -> str | None:
    """The first case of the run's method whose numbers differ; None if there is none."""
    parts = parts_of(config)
    for case in sorted(then.keys() & now.keys()):
        if any(_is_one_of(part, parts) for part in case.split("/")) and _concerns(case, config):
            (old, tolerance), (new, _) = then[case], now[case]
            if _differ(old, new, tolerance):
                return case
    return None


def _concerns(case: str, config: Config) -> bool:
    """Whether a run on the network of this configuration computes what the case does."""
    if config.get("model", "mlp") != "mlp" or config.get("sites", "auto") != "auto":
        return True
    _, network, *_ = *case.split("/"), ""
    return network.startswith(_CHAINS) and (case.endswith("/plain") or not case.startswith(_CUT))


def _is_one_of(part: str, names: frozenset[str]) -> bool:
    """Whether a part of a case's path is such a name, or a variation of one: `chained-part` is one of `chained`."""
    return part in names or (part not in _APART and part.startswith(tuple(f"{name}-" for name in names)))


def parts_of(config: Config) -> frozenset[str]:
    """What the method of a run is called in the golden record.

    >>> sorted(parts_of({"method": "wperp", "solver": "subspace"})), sorted(parts_of({"method": "wt"}))
    (['subspace'], ['wt'])
    """
    method = str(config.get("method"))
    if method == "wperp":
        return frozenset({str(config.get("solver", "shared"))})
    if method == "wperp-ns":
        return frozenset({"ns-placed" if config.get("threshold") == "placed" else "ns"})
    return frozenset(_PARTS.get(method, (method,)))


def _differ(old: Mapping[str, float], new: Mapping[str, float], tolerance: float) -> bool:
    if old.keys() != new.keys():
        return True
    largest = max((abs(value) for value in old.values()), default=0.0)
    return any(not abs(new[label] - value) <= tolerance * max(largest, 1e-300) for label, value in old.items())


def read_golden(data: bytes) -> Golden:
    """The record in the bytes of its file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        about, values = json.loads(file["about"].tobytes()), iter(file["values"].tolist())
    numbers = {name: {label: next(values) for label in labels} for name, labels in about["labels"].items()}
    return {name: (found, about["tolerances"].get(name, TOLERANCE)) for name, found in numbers.items()}


def _present(root: Path) -> Golden:
    path = root / GOLDEN
    if not path.exists():
        raise GradguessError(f"expected the golden record at {path}, found none: this is not a whole checkout.")
    return read_golden(path.read_bytes())


def _golden_of(root: Path, commit: str) -> Golden | str:
    """The record as of a commit, or why there is none."""
    try:
        _git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except GradguessError:
        return f"commit {commit[:10]} is not in this repository"
    try:
        return read_golden(_git(root, "show", f"{commit}:{GOLDEN}"))
    except GradguessError:
        return f"commit {commit[:10]} has no golden record"


def _repository(package: Path) -> Path:
    try:
        return Path(_git(package, "rev-parse", "--show-toplevel").decode().strip())
    except GradguessError as error:
        raise GradguessError(
            f"--check compares results with the history of the code, and {package} is in no git repository ({error}): "
            "run it in a clone of gradguess."
        ) from error


def _git(where: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise GradguessError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
