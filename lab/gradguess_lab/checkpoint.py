"""Checkpoints: tensors in safetensors, the rest in JSON, no pickle, and the two always belong together.

The tensors of epoch n go to `checkpoint-n.safetensors`; then `checkpoint.json`, which names that file and its
digest, is replaced in one step; then older tensor files are deleted. A kill between any two leaves a whole pair.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from gradguess.errors import GradguessError
from gradguess.extras import require
from gradguess_lab.files import explained, read_json, write_atomic, write_json

INDEX = "checkpoint.json"


def _safetensors() -> Any:
    return require("safetensors.torch", "gradguess-lab", "a checkpoint")


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _seal(state: dict[str, Any]) -> str:
    """A digest of the index itself, so that an edit by hand is noticed."""
    return digest(json.dumps({**state, "seal": ""}, sort_keys=True).encode())


def save(directory: Path, tensors: dict[str, Tensor], state: dict[str, Any], epoch: int) -> None:
    """Make (`tensors`, `state`) the checkpoint of `directory`."""
    name = f"checkpoint-{epoch}.safetensors"
    data = _safetensors().save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    write_atomic(directory / name, data)
    index = {"schema": 1, "tensors": name, "digest": digest(data), "epoch": epoch, **state, "seal": ""}
    index["seal"] = _seal(index)
    write_json(directory / INDEX, index)
    for old in directory.glob("checkpoint-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint of `directory`, or None where there is none yet; damage is an error that says so.

    The run may go on while we read. So tensors that do not belong to the index are damage only if the index on the
    disk is still the one that we read.
    """
    while True:
        index = _index(directory)
        if index is None:
            return None
        try:
            return _tensors(directory, index), index
        except GradguessError:
            if _index(directory) == index:
                raise


def _index(directory: Path) -> dict[str, Any] | None:
    if not (directory / INDEX).exists():
        return None
    index: dict[str, Any] = read_json(directory / INDEX, "checkpoint")
    if index.get("seal") != _seal(index):
        raise _damaged(directory / INDEX, "was edited, or written by another version")
    if not _well_formed(index):
        raise _damaged(directory / INDEX, "has fields that are missing or of another type")
    return index


def _tensors(directory: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    path = directory / index["tensors"]
    if not path.is_file():
        raise _damaged(path, "is missing")
    with explained(path):
        data = path.read_bytes()
    if digest(data) != index["digest"]:
        raise _damaged(path, "is truncated or was changed")
    library = _safetensors()
    try:
        return library.load(data)
    except Exception as error:  # the library has errors of its own, and the header may say anything
        raise _damaged(path, f"is not a file of tensors ({str(error).splitlines()[0][:120]})") from error


def _well_formed(index: dict[str, Any]) -> bool:
    """Whether the fields have the types that `save` writes: the seal is no secret, and anybody can compute it."""
    name, epoch, metrics, peak = (index.get(key) for key in ("tensors", "epoch", "metrics", "peak_mb"))
    return (
        isinstance(name, str)
        and re.fullmatch(r"checkpoint-\d+\.safetensors", name) is not None
        and isinstance(epoch, int)
        and name == f"checkpoint-{epoch}.safetensors"
        and isinstance(index.get("digest"), str)
        and isinstance(metrics, dict)
        and isinstance(metrics.get("bytes"), int)
        and metrics["bytes"] >= 0
        and isinstance(metrics.get("digest"), str)
        and isinstance(peak, int | float)
        and math.isfinite(peak)
    )


def by_part(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors with names like `part/name`, as one dictionary for each part."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    return parts


def _damaged(path: Path, what: str) -> GradguessError:
    return GradguessError(
        f"checkpoint {path} {what}. It cannot be continued: restore it, or delete {path.parent} to start afresh."
    )
